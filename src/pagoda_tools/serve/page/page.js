// The operator's page. Everything it shows comes as text from /events (see serve/overview.py); data is never made into markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MOST_SAMPLES = 300; // as many as the server keeps
const REASONS = {
  absent: "never stored, or removed and forgotten", evicted: "stored, then evicted: more memory or disk would have kept it",
  cleared: "cleared on request", removed: "removed by its key", other_namespace: "stored under another namespace",
  busy: "another call was storing or loading it", failed_check: "damaged bytes, not served", below_minimum: "fewer than min_hit_tokens",
  not_worth_it: "computing is faster than loading", ledger_busy: "the ledger's lock was not free in time",
  deadline: "a tier did not answer in time", io_error: "the system or a server reported an error", short_prompt: "no whole chunk", not_cacheable: "the request has what no key contains",
  not_asked: "requests that may not read, in no rate",
  tier_skipped: "a tier failed repeatedly and is skipped", full: "no slot may be evicted", not_admitted: "less useful than the chunk it would replace",
  queue_full: "the tier is slower than the stores", too_large: "does not fit a slot", stale: "evicted before it was written",
  superseded: "another call stored it first", closed: "the cache was closed", pin_limit: "a quarter is pinned already",
  rebuilding: "the store is being rebuilt",
};

const byId = (id) => document.getElementById(id);
let samples = [];
let latest = null;

// ---- building elements

function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Replaces the children only if what is shown changed: focus and selection stay.
function show(parent, children, state) {
  const text = JSON.stringify(state);
  if (parent.dataset.shown === text) return;
  parent.dataset.shown = text;
  parent.replaceChildren(...children());
}

// ---- numbers

const count = (n) => Math.round(n).toLocaleString("en");
const short = (n) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(n);
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole / 10 ? 1 : 0)} %` : "none yet");

function bytes(n) {
  if (n === null || n === undefined) return "unknown";
  let unit = 0;
  while (n >= 1024 && unit < 5) { n /= 1024; unit += 1; }
  return `${unit && n < 100 ? n.toFixed(1) : Math.round(n)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

function duration(seconds) {
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  for (const [limit, divisor, unit] of [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]])
    if (seconds < limit) return `${(seconds / divisor).toFixed(seconds < 10 * divisor ? 1 : 0)} ${unit}`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

// ---- the tower: one storey a tier, its windows lit as far as it is full

function spire() {
  const picture = draw("svg", { viewBox: "0 0 240 34", "aria-hidden": "true" },
    draw("path", { class: "roof", d: "M118 34V14h4v20z" }), draw("circle", { class: "window lit", cx: 120, cy: 11, r: 5 }),
    draw("path", { class: "roof", d: "M113 20h14v3h-14zM111 27h18v3h-18z" }));
  return make("li", { className: "ornament", "aria-hidden": "true" }, picture, make("div"));
}

function base(half) {
  const steps = [[half + 10, 0], [half + 22, 7]].map(([w, y]) => draw("rect", { class: "stone", x: 120 - w, y, width: 2 * w, height: 7 }));
  return make("li", { className: "ornament", "aria-hidden": "true" }, draw("svg", { viewBox: "0 0 240 14", "aria-hidden": "true" }, ...steps), make("div"));
}

const halfWidth = (index, storeys) => 46 + Math.min(48, index * Math.max(9, 44 / Math.max(1, storeys - 1)));

function storeyPicture(index, storeys, share) {
  const w = halfWidth(index, storeys), eave = w + 24, top = w * 0.62;
  const roof = `M${120 - eave} 27C${120 - w} 26 ${120 - top - 6} 18 ${120 - top} 2H${120 + top}C${120 + top + 6} 18 ${120 + w} 26 ${120 + eave} 27` +
    `C${120 + w + 8} 36 ${120 + w} 35 ${120 + w - 6} 36H${120 - w + 6}C${120 - w} 35 ${120 - w - 8} 36 ${120 - eave} 27Z`;
  const picture = draw("svg", { viewBox: "0 0 240 82", "aria-hidden": "true" },
    draw("rect", { class: "wall", x: 120 - w + 8, y: 35, width: 2 * w - 16, height: 47 }), draw("path", { class: "roof", d: roof }));
  const windows = 10, room = 2 * w - 28, step = room / windows, lit = share === null ? 0 : Math.ceil(share * windows - 1e-9);
  for (let n = 0; n < windows; n += 1)
    picture.append(draw("rect", { class: n < lit ? "window lit" : "window", x: 120 - room / 2 + n * step + step * 0.15, y: 48, width: step * 0.7, height: 26, rx: step * 0.3 }));
  const rest = make("div", { className: "rest" }); // the wall, as far down as the words beside it need
  rest.style.width = `${(2 * w - 16) / 2.4}%`;
  return make("div", { className: "picture", ariaHidden: "true" }, picture, rest);
}

function storey(tier, index, storeys, perSecond) {
  const share = tier.size_bytes ? tier.used_bytes / tier.size_bytes : null;
  const facts = [make("h3", { className: tier.kind }, tier.title)];
  facts.push(make("p", { className: "full" }, share === null ? (tier.used_bytes === null ? "fill unknown" : bytes(tier.used_bytes)) : `${percent(tier.used_bytes, tier.size_bytes)} full`));
  if (share !== null) facts.push(make("p", { className: "soft" }, `${bytes(tier.used_bytes)} of ${bytes(tier.size_bytes)}${tier.chunks === null ? "" : `, ${count(tier.chunks)} chunks`}`));
  if (tier.address) facts.push(make("p", { className: "soft" }, make("code", {}, tier.address)));
  if (tier.trouble) facts.push(make("p", { className: "trouble" }, tier.trouble));
  if (tier.hit_tokens !== null)
    facts.push(make("p", { className: "soft" }, `${short(tier.hit_tokens)} tokens served${perSecond ? `, ${short(perSecond)}/s now` : ""}`));
  const classes = ["storey", share === null ? "unknown" : "", perSecond ? "serving" : "", tier.trouble ? "silent" : ""];
  return make("li", { className: classes.join(" ") }, storeyPicture(index, storeys, share), make("div", { className: "facts" }, ...facts));
}

function showTower(now, last) {
  const rates = Object.fromEntries(now.tiers.map((tier) => [tier.title, tier.hit_tokens !== null && last && last.seconds ? (last.hit_tokens[tier.kind] || 0) / last.seconds : 0]));
  show(byId("storeys"), () => {
    if (!now.tiers.length) return [make("li", {}, make("p", { className: "soft" }, "Nothing is stored yet. Start an engine with PagodaKV, and its tiers appear here."))];
    const storeys = now.tiers.map((tier, index) => storey(tier, index, now.tiers.length, rates[tier.title]));
    return [spire(), ...storeys, base(halfWidth(storeys.length - 1, storeys.length))];
  }, [now.tiers, rates]);
}

// ---- figures, reasons, tables

function figure(title, value, words) {
  return make("div", {}, make("dt", {}, title),
    make("dd", {}, make("span", { className: value === null ? "figure unknown" : "figure" }, value === null ? "unknown" : value), make("span", { className: "soft" }, words)));
}

function showSaved({ totals, saved }) {
  show(byId("saved"), () => [
    figure("Tokens from the cache", percent(totals.hit_tokens, totals.asked_tokens), `${short(totals.hit_tokens)} of ${short(totals.asked_tokens)} requested tokens, ${short(totals.lookups)} requests`),
    figure("Waiting for first tokens saved", saved.first_token_seconds === null ? null : duration(saved.first_token_seconds), saved.first_token_words),
    figure("Engine time saved", saved.engine_seconds === null ? null : duration(saved.engine_seconds), saved.engine_words),
    figure("Money saved", saved.money === null ? null : saved.money.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }), saved.money_words),
  ], [totals, saved]);
}

function showReasons(list, reasons, none) {
  show(list, () => {
    const rows = Object.entries(reasons).sort((a, b) => b[1] - a[1]);
    if (!rows.length) return [make("li", { className: "soft" }, none)];
    return rows.map(([reason, n]) => {
      const bar = make("div");
      bar.style.width = `${(100 * n) / rows[0][1]}%`;
      return make("li", {}, make("div", { className: "line" }, make("strong", {}, reason.replaceAll("_", " ")), make("span", { className: "number" }, count(n))),
        make("div", { className: "bar", ariaHidden: "true" }, bar), make("span", { className: "note" }, REASONS[reason] || ""));
    });
  }, reasons);
}

// What tells a namespace apart: its model and whatever is set beside it. Of a salt, the fields have only a digest.
function titleOf({ fields }) {
  const beside = ["revision", "kv_dtype", "lora", "salt"].filter((name) => fields[name]).map((name) => `${name}=${fields[name]}`);
  if ((fields.weights_epoch || "0") !== "0") beside.push(`weights_epoch=${fields.weights_epoch}`);
  return [fields.model || "(not named)", ...beside].join(" ");
}

function showNamespaces(rows, more) {
  show(byId("namespaces"), () => {
    if (!rows.length) return [make("tr", {}, make("td", { colSpan: 5, className: "soft" }, "No engine has stored anything yet."))];
    const shown = rows.map((row) => make("tr", {},
      make("th", { scope: "row" }, titleOf(row)), make("td", {}, make("code", {}, row.namespace.slice(0, 12))),
      make("td", { className: "number" }, Object.entries(row.chunks).map(([tier, n]) => `${tier} ${count(n)}`).join(", ") || "0"),
      make("td", { className: "number" }, bytes(row.bytes)),
      make("td", {}, make("button", { type: "button", ariaLabel: `Clear ${titleOf(row)}`, onclick: () => clear(row) }, "Clear…"))));
    if (more) shown.push(make("tr", {}, make("td", { colSpan: 5, className: "soft" }, `and ${count(more)} more: pagoda stats lists them`)));
    return shown;
  }, [rows, more]);
}

function table(columns, rows) {
  return make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))))));
}

function showPins(pins, more) {
  show(byId("pins"), () => {
    if (!pins.length) return [make("p", { className: "soft" }, "Nothing is pinned. Pin a prompt with the question box.")];
    const shown = [table(["Tier", "In whose name", "Chunks", ""], pins.map((pin) => [pin.tier, pin.owner, count(pin.chunks),
      make("button", { type: "button", ariaLabel: `End the pins of ${pin.owner}`, onclick: () => change("unpin", { owner: pin.owner }, byId("answer")) }, "Unpin")]))];
    if (more) shown.push(make("p", { className: "soft" }, `and ${count(more)} more: pagoda stats lists them`));
    return shown;
  }, [pins, more]);
}

function showSettings(settings) {
  show(byId("settings"), () => settings.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]), settings);
}

function showTroubles(troubles) {
  show(byId("troubles"), () => troubles.map((text) => make("p", { className: "notice" }, text)), troubles);
}

// ---- the chart, the last requests

const KINDS = [["host", "host memory"], ["disk", "disk"], ["remote", "remote"]];

function showChart() {
  const width = 600, height = 160, end = samples.length ? samples.at(-1).time : 0;
  const span = samples.length ? Math.min(MOST_SAMPLES, Math.max(60, end - samples[0].time + samples[0].seconds)) : 60;
  const rate = (sample, kind) => (sample.seconds ? (sample.hit_tokens[kind] || 0) / sample.seconds : 0);
  const most = Math.max(1, ...samples.map((sample) => KINDS.reduce((sum, [kind]) => sum + rate(sample, kind), 0)));
  const x = (time) => (width * Math.max(0, span - (end - time))) / span;
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": chartWords(most, span) });
  for (const part of [0.25, 0.5, 0.75]) picture.append(draw("line", { x1: 0, x2: width, y1: height * part, y2: height * part, "vector-effect": "non-scaling-stroke" }));
  const floor = samples.map(() => 0);
  for (const [kind] of KINDS) {
    let path = "";
    samples.forEach((sample, n) => {
      const low = floor[n], high = low + rate(sample, kind);
      floor[n] = high;
      if (high === low) return;
      const left = x(sample.time - sample.seconds), right = Math.max(x(sample.time), left + 1.2);
      const y = (value) => (height * (1 - value / most)).toFixed(1);
      path += `M${left.toFixed(1)} ${y(low)}V${y(high)}H${right.toFixed(1)}V${y(low)}z`;
    });
    picture.append(draw("path", { class: kind, d: path }));
  }
  picture.append(draw("line", { x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5, "vector-effect": "non-scaling-stroke" }));
  byId("chart").replaceChildren(picture,
    make("p", { className: "labels" }, make("span", {}, `${duration(span)} ago`), make("span", {}, most > 1 ? `top of the chart: ${short(most)} tokens/s` : "nothing was served in this time"), make("span", {}, "now")));
}

function chartWords(most, span) {
  const sums = KINDS.map(([kind, title]) => `${title} ${count(samples.reduce((sum, sample) => sum + (sample.hit_tokens[kind] || 0), 0))}`);
  return `Tokens served in the last ${duration(span)}, by tier: ${sums.join(", ")}; at most ${count(most > 1 ? most : 0)} per second`;
}

function showRequests(requests) {
  show(byId("requests"), () => (requests.length ? requests.map((row) => make("tr", {},
    make("td", {}, new Date(1000 * row.time).toLocaleTimeString("en-GB")), make("td", { className: "number" }, count(row.asked_tokens)),
    make("td", { className: "number hits" }, KINDS.filter(([kind]) => row.hit_tokens[kind]).map(([kind]) => `${kind} ${count(row.hit_tokens[kind])}`).join(", ") || "0"),
    make("td", {}, (row.reason || "complete").replaceAll("_", " ")), make("td", { className: "model" }, titleOf(row)), make("td", { className: "number" }, `${row.pid}`)))
    : [make("tr", {}, make("td", { colSpan: 6, className: "soft" }, "No request yet."))]), requests);
}

// ---- live

function refresh(now) {
  latest = now;
  byId("machine").textContent = now.machine;
  byId("log-out").hidden = !now.login;
  byId("version").textContent = `PagodaKV ${now.version}`;
  showTroubles(now.troubles);
  showTower(now, samples.at(-1));
  showSaved(now);
  showReasons(byId("misses"), now.misses, "No request got less than it asked for.");
  showReasons(byId("drops"), now.drops, "Every chunk was stored.");
  showNamespaces(now.namespaces, now.more_namespaces);
  showPins(now.pins, now.more_pins);
  showSettings(now.settings);
  showChart();
  showRequests(now.requests);
  byId("as-text").disabled = !now.tokenizer;
  byId("text-note").textContent = now.tokenizer ? "" : "(text: start the server with --tokenizer PATH)";
}

function setLive(state, words) {
  const live = byId("live");
  if (live.className === `live ${state}`) return;
  live.className = `live ${state}`;
  live.textContent = words;
}

function listen() {
  const stream = new EventSource("events");
  stream.addEventListener("snapshot", (event) => {
    const now = JSON.parse(event.data);
    if (now.history) samples = now.history;
    else if (now.sample) samples = [...samples, now.sample].slice(-MOST_SAMPLES);
    setLive("here", "live");
    refresh(now);
  });
  stream.onerror = () => {
    setLive("lost", "no connection to pagoda serve: trying again");
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}

// ---- questions and changes

async function post(path, value) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) });
  const text = await answer.text();
  let found = {};
  try { found = JSON.parse(text); } catch { found = { remedy: text.slice(0, 300) }; }
  return { status: answer.status, ok: answer.ok, ...found };
}

function logIn() {
  const dialog = byId("login"), form = dialog.querySelector("form");
  byId("token").value = "";
  byId("login-trouble").textContent = "";
  dialog.showModal();
  return new Promise((resolve) => {
    byId("login-no").onclick = () => dialog.close();
    dialog.onclose = () => resolve(dialog.returnValue === "in");
    dialog.returnValue = "";
    form.onsubmit = async (event) => {
      event.preventDefault();
      const answer = await post("login", { token: byId("token").value });
      byId("token").value = "";
      if (answer.ok) dialog.close("in");
      else byId("login-trouble").textContent = answer.remedy || "wrong token";
    };
  });
}

async function change(path, value, output) {
  output.replaceChildren(make("p", { className: "soft" }, "…"));
  let answer;
  try {
    answer = await post(path, value);
    if (answer.status === 401 && (await logIn())) answer = await post(path, value);
  } catch (trouble) {
    answer = { ok: false, remedy: `no answer: ${trouble.message}` };
  }
  if (answer.ok) output.replaceChildren(...said(path, answer));
  else output.replaceChildren(make("p", { className: "trouble" }, answer.remedy || answer.reason || `refused (${answer.status})`));
}

function said(path, answer) {
  if (path !== "explain") return [make("p", {}, answer.said)];
  const left = Object.entries(answer.left).map(([place, why]) => make("p", { className: "trouble" }, `${place}: ${why}`));
  if (!answer.namespaces.length) return [make("p", {}, "Nothing is stored yet, so no prompt would hit."), ...left];
  return left.concat(answer.namespaces.flatMap((found) => [make("h3", {}, found.model),
    table(["Tier", `Of ${count(answer.asked_tokens)} tokens`, "Why not more"],
      found.answers.map((row) => [row.tier, count(row.num_tokens), (row.reason || "all whole chunks are stored").replaceAll("_", " ")])),
    ...found.lines.map((line) => make("p", { className: "note" }, line))]));
}

function clear(row) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = row ? "Clear this namespace?" : "Clear everything?";
  byId("confirm-text").textContent = row
    ? `All chunks of ${titleOf(row)} are removed from this machine's host memory and disks, pinned ones too. They will be computed again.`
    : "All chunks of all models and tenants are removed from this machine's host memory and disks, pinned ones too. They will be computed again.";
  dialog.returnValue = "no";
  dialog.onclose = () => {
    if (dialog.returnValue === "yes") change("clear", row ? { namespace: row.namespace } : { everything: true }, byId("answer"));
  };
  dialog.showModal();
}

byId("clear-all").onclick = () => clear(null);
byId("log-out").onclick = async () => { await post("logout", {}); location.reload(); };
byId("question").onsubmit = (event) => {
  event.preventDefault();
  const text = byId("prompt").value, asText = byId("as-text").checked && !byId("as-text").disabled, output = byId("answer");
  const ids = text.split(/[\s,[\]]+/).filter(Boolean);
  if (!asText && (!ids.length || ids.some((id) => !/^\d{1,10}$/.test(id)))) {
    output.replaceChildren(make("p", { className: "trouble" }, "Write token ids: whole numbers, separated by spaces or commas."));
    return;
  }
  change(event.submitter ? event.submitter.value : "explain", asText ? { text } : { tokens: ids.map(Number) }, output);
};
byId("legend").replaceChildren(...KINDS.map(([kind, title]) => make("span", { className: kind }, title)));
listen();
