// The operator's page. Everything it shows comes as text from /events (see serve/overview.py); data is
// never made into markup. This module listens to the events and says whether the figures are fresh.

import { addSpans, newestSpan, replaceMinutes, replaceSpans, showChart } from "./chart.js";
import { KINDS, age, byId, make } from "./elements.js";
import { ClockDifference, Freshness } from "./freshness.js";
import { showNamespaces, showPins, showRates, showReasons, showRequests, showSaved, showScrolling, showSettings, showTroubles, showUsage } from "./lists.js";
import { change, clear, listenToForms, logIn, showModels } from "./prompts.js";
import { showTower } from "./tower.js";

const TICK_MILLISECONDS = 500;
const RETRY_MILLISECONDS = 3000;
const MINUTES_MILLISECONDS = 60_000; // the chart of a day is asked for again
const CLOCK_SECONDS = 30; // a difference of clocks that people should know of

const freshness = new Freshness();
const clocks = new ClockDifference();
let latest = null;
let view = "minutes";
let stream = null; // of the present connection: an AbortController
let wasFresh = false;

// ---- showing

function refresh(now) {
  latest = now;
  byId("machine").textContent = now.machine;
  byId("log-out").hidden = !now.login;
  byId("version").textContent = `PagodaKV ${now.version}`;
  showTroubles(now.troubles);
  showSaved(now);
  showUsage(now);
  showReasons(byId("misses"), now.misses, "No request got less than it asked for.");
  showReasons(byId("drops"), now.drops, "Every chunk was stored.");
  showNamespaces(now.namespaces, now.more_namespaces, clear);
  showPins(now.pins, now.more_pins, (pin) => change("unpin", { owner: pin.owner }));
  showSettings(now.settings);
  showRequests(now.requests, now.time);
  showModels(now.namespaces, now.more_namespaces);
  byId("as-text").disabled = !now.tokenizer;
  byId("text-note").textContent = now.tokenizer ? "" : "(text: start the server with --tokenizer PATH)";
  const other = clocks.seconds();
  const words = `Times are by the server's clock: this device's is ${age(Math.abs(other))} ${other > 0 ? "ahead" : "behind"}.`;
  byId("clocks").textContent = Math.abs(other) > CLOCK_SECONDS ? words : "";
  showPresent();
  showScrolling();
}

// What is true of this very moment only: rates "now", the right edge of the chart.
function showPresent() {
  if (latest === null) return;
  const fresh = freshness.isFresh();
  showRates(latest, fresh);
  showTower(latest.tiers, fresh ? newestSpan(latest.machine_seconds) : null);
  showChart(latest.machine_seconds, view, fresh ? 0 : Math.max(1, freshness.age()));
}

// Says how old the figures are. Called often, and whenever the page is seen again: the timers of a
// hidden page, or of a laptop that slept, come late.
function showFreshness() {
  const [state, words, counting] = freshness.words();
  const live = byId("live");
  live.className = `live ${state}`;
  if (byId("live-state").textContent !== words) byId("live-state").textContent = words;
  byId("live-age").textContent = counting;
  byId("log-in").hidden = freshness.connection !== "out";
  const fresh = freshness.isFresh();
  document.body.classList.toggle("stale", latest !== null && !fresh);
  document.title = fresh || latest === null ? "PagodaKV" : "(no data) PagodaKV";
  if (wasFresh !== fresh || !fresh) showPresent();
  wasFresh = fresh;
}

// ---- listening

function received(now) {
  if (latest !== null && latest.version !== now.version) byId("renewed").hidden = false;
  if (now.history) {
    replaceSpans(now.history);
    askForMinutes();
  } else addSpans(now.spans);
  freshness.arrived(now.age_seconds);
  clocks.note(now.time);
  refresh(now);
  showFreshness();
}

// Reads the events of one connection. It ends with an error, whatever happens.
async function read(signal) {
  const answer = await fetch("events", { signal, cache: "no-store", headers: { Accept: "text/event-stream" } });
  if (answer.status === 401) throw Object.assign(new Error(), { needsLogin: true });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(), { reason: said.remedy || `the server refuses (${answer.status})` });
  }
  const pieces = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await pieces.read();
    if (done) throw new Error("it ended");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (data) received(JSON.parse(data.slice(6)));
    }
  }
}

async function listen() {
  const own = new AbortController();
  stream = own;
  freshness.opened();
  try {
    await read(own.signal);
  } catch (trouble) {
    if (stream !== own) return; // another connection has taken its place
    freshness.reason = trouble.reason || "";
    freshness.connection = trouble.needsLogin ? "out" : "lost";
    if (!trouble.needsLogin) setTimeout(listen, RETRY_MILLISECONDS);
  }
  own.abort();
  showFreshness();
  if (freshness.connection === "out" && (await logIn())) listen();
}

// The network of a sleeping laptop may be gone without a word: nothing is heard, and nothing fails.
function tick() {
  if (!stream.signal.aborted && freshness.isSilent()) {
    stream.abort();
    listen();
  }
  showFreshness();
}

// ---- the chart's time

async function askForMinutes() {
  if (view === "minutes" || document.hidden) return;
  try {
    const answer = await fetch("history.json", { cache: "no-store" });
    if (answer.ok) replaceMinutes((await answer.json()).minutes);
  } catch {
    return; // it says already that there is no connection
  }
  showPresent();
}

function choose(chosen) {
  view = chosen;
  for (const button of byId("views").children) button.setAttribute("aria-pressed", `${button.value === view}`);
  askForMinutes();
  showPresent();
}

for (const button of byId("views").children) button.onclick = () => choose(button.value);
const unlooked = make("span", { id: "unlooked-legend", hidden: true }, "not known: nobody looked");
byId("legend").replaceChildren(...KINDS.map(([kind, title]) => make("span", { className: kind }, title)), unlooked);
byId("log-in").onclick = async () => {
  if (await logIn()) listen();
};
byId("reload").onclick = () => location.reload();
for (const place of document.querySelectorAll(".scroll")) place.addEventListener("scroll", showScrolling, { passive: true });
window.addEventListener("resize", showScrolling);
for (const name of ["visibilitychange", "resume"]) document.addEventListener(name, tick);
document.addEventListener("visibilitychange", askForMinutes);
for (const name of ["focus", "pageshow", "online"]) window.addEventListener(name, tick);
listenToForms();
setInterval(tick, TICK_MILLISECONDS);
setInterval(askForMinutes, MINUTES_MILLISECONDS);
listen();
