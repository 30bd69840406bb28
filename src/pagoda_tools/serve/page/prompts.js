// Questions about prompts, and changes: explain, pin, unpin, warm, clear, log in. `page.js` calls it.

import { byId, count, make, show, table, titleOf } from "./elements.js";
import { remedyOf, worded } from "./reasons.js";

const ANSWER_SECONDS = 90; // the server gives up after 60

async function post(path, value) {
  const body = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) };
  const answer = await fetch(path, { ...body, signal: AbortSignal.timeout(1000 * ANSWER_SECONDS) });
  const text = await answer.text();
  let found = {};
  try {
    found = JSON.parse(text);
  } catch {
    found = { remedy: text.slice(0, 300) };
  }
  return { status: answer.status, ok: answer.ok, ...found };
}

// Asks for the token; true after a login. A second call waits for the same dialog.
let asking = null;

export function logIn() {
  asking = asking || askForToken().finally(() => { asking = null; });
  return asking;
}

function askForToken() {
  const dialog = byId("login");
  const form = dialog.querySelector("form");
  byId("token").value = "";
  byId("login-trouble").textContent = "";
  dialog.showModal();
  return new Promise((resolve) => {
    byId("login-no").onclick = () => dialog.close();
    dialog.onclose = () => resolve(dialog.returnValue === "in");
    dialog.returnValue = "";
    form.onsubmit = async (event) => {
      event.preventDefault();
      let answer;
      try {
        answer = await post("login", { token: byId("token").value });
      } catch (trouble) {
        answer = { ok: false, remedy: `no answer: ${trouble.message}` };
      }
      byId("token").value = "";
      if (answer.ok) dialog.close("in");
      else byId("login-trouble").textContent = answer.remedy || "wrong token";
    };
  });
}

export async function logOut() {
  await post("logout", {});
  location.reload();
}

export async function change(path, value) {
  const output = byId("answer");
  output.replaceChildren(make("p", { className: "soft" }, "…"));
  let answer;
  try {
    answer = await post(path, value);
    if (answer.status === 401 && (await logIn())) answer = await post(path, value);
  } catch (trouble) {
    answer = { ok: false, remedy: `no answer: ${trouble.message}` };
  }
  if (!answer.ok) complain(answer.remedy || answer.reason || `refused (${answer.status})`);
  else output.replaceChildren(...(path === "explain" ? explained(answer) : [make("p", {}, answer.said)]));
}

function complain(text) {
  byId("answer").replaceChildren(make("p", { className: "trouble" }, text));
}

function explained(answer) {
  const left = Object.entries(answer.left).map(([place, why]) => make("p", { className: "trouble" }, `${place}: ${why}`));
  if (!answer.namespaces.length) return [make("p", {}, "Nothing is stored yet, so no prompt would hit."), ...left];
  return left.concat(answer.namespaces.flatMap((found) => explanation(found, answer.asked_tokens)));
}

function explanation(found, asked) {
  const rows = found.answers.map((row) => [row.tier, count(row.num_tokens), worded(row.reason || "all whole chunks are stored")]);
  const parts = [make("h3", {}, found.model), table(["Tier", `Of ${count(asked)} tokens`, "Why not more"], rows)];
  parts.push(...found.lines.map((line) => make("p", { className: "note" }, line)));
  if (found.texts) parts.push(differing(found.texts));
  const remedy = remedyOf(found.answers.at(-1).reason);
  if (remedy) parts.push(make("p", { className: "remedy" }, make("strong", {}, "What to do: "), remedy));
  return parts;
}

// Text of the token that differs, with what stands before it.
function differing({ before, here, stored }) {
  const side = (title, text) => [make("dt", {}, title), make("dd", {}, text === null ? "(its end)" : make("code", {}, before, make("mark", {}, text)))];
  return make("dl", { className: "settings texts" }, ...side("here", here), ...side("nearest stored prompt", stored));
}

export function clear(row) {
  const dialog = byId("confirm");
  const all = "All chunks of all models and tenants are removed from this machine's host memory and disks, pinned ones too. They will be computed again.";
  byId("confirm-title").textContent = row ? "Clear this namespace?" : "Clear everything?";
  byId("confirm-text").textContent = row
    ? `All chunks of ${titleOf(row)} are removed from this machine's host memory and disks, pinned ones too. They will be computed again.`
    : all;
  dialog.returnValue = "no";
  dialog.onclose = () => {
    if (dialog.returnValue === "yes") change("clear", row ? { namespace: row.namespace } : { everything: true });
  };
  dialog.showModal();
}

// The models to choose from. With several, none is chosen: an answer about another model is no answer.
export function showModels(rows, more) {
  const list = byId("model");
  const chosen = list.value;
  const known = rows.map((row) => [row.namespace, titleOf(row)]);
  show(list, [known, more], () => {
    const option = ([value, title]) => make("option", { value }, title);
    const all = option(["all", more ? `all of them, and ${count(more)} more` : "all of them"]);
    if (known.length < 2) return known.length ? known.map(option) : [option(["all", "no model yet"])];
    return [option(["", "choose a model…"]), ...known.map(option), all];
  });
  if ([...list.options].some((one) => one.value === chosen)) list.value = chosen;
}

function ask(event) {
  event.preventDefault();
  const model = byId("model").value;
  const text = byId("prompt").value;
  const asText = byId("as-text").checked && !byId("as-text").disabled;
  if (!model) {
    complain("Choose the model first.");
    byId("model").focus();
    return;
  }
  const ids = text.split(/[\s,[\]]+/).filter(Boolean);
  if (!asText && (!ids.length || ids.some((id) => !/^\d{1,10}$/.test(id)))) {
    complain("Write token ids: whole numbers, separated by spaces or commas.");
    return;
  }
  const prompt = asText ? { text } : { tokens: ids.map(Number) };
  const about = model === "all" ? {} : { namespace: model };
  change(event.submitter ? event.submitter.value : "explain", { ...prompt, ...about });
}

export function listenToForms() {
  byId("clear-all").onclick = () => clear(null);
  byId("log-out").onclick = logOut;
  byId("question").onsubmit = ask;
}
