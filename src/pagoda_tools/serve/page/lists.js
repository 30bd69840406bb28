// The figures, bars and tables of the page. `page.js` calls it with each overview.

import { KINDS, byId, bytes, count, duration, keyed, make, percent, perSecond, short, show, speed, table, titleOf } from "./elements.js";
import { meaningOf, worded } from "./reasons.js";

// ---- figures

function figure(title, value, words) {
  const classes = value === null ? "figure unknown" : "figure";
  return make("div", {}, make("dt", {}, title),
    make("dd", {}, make("span", { className: classes }, value === null ? "unknown" : value), make("span", { className: "soft" }, words)));
}

export function showSaved({ totals, saved }) {
  const seconds = (value) => (value === null ? null : duration(value));
  const money = (value) => value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  show(byId("saved"), [totals, saved], () => [
    figure("Tokens from the cache", percent(totals.hit_tokens, totals.asked_tokens),
      `${short(totals.hit_tokens)} of ${short(totals.asked_tokens)} requested tokens, ${short(totals.lookups)} requests`),
    figure("Waiting for first tokens saved", seconds(saved.first_token_seconds), saved.first_token_words),
    figure("Engine time saved", seconds(saved.engine_seconds), saved.engine_words),
    figure("Money saved", saved.money === null ? null : money(saved.money), saved.money_words),
  ]);
}

function busiest(tiers) {
  const stores = tiers.flatMap((tier) => tier.stores || []);
  const most = stores.reduce((best, one) => ((one.evicted_per_second || 0) > (best ? best.evicted_per_second : 0) ? one : best), null);
  if (!most || stores.length < 2) return "";
  return `most in ${most.models.join(", ") || most.directory}: ${perSecond(most.evicted_per_second, 1)}`;
}

function loadWords(rates) {
  const within = (seconds) => (seconds === null ? "more than 3 s" : duration(seconds));
  return `half within ${within(rates.load_seconds_half)}, 99 % within ${within(rates.load_seconds_99)}; ${count(rates.loads)} loads`;
}

// `fresh`: whether the last minute is the one before now.
export function showRates({ rates, tiers }, fresh) {
  const looked = rates.seconds;
  const time = looked > 50 || !looked ? "minute" : duration(looked);
  const title = fresh ? `In the last ${time}` : `In the ${time} before the data ended`;
  if (byId("rates-title").textContent !== title) byId("rates-title").textContent = title;
  show(byId("rates"), [rates, busiest(tiers)], () => {
    if (!looked) return [figure("Rates", null, "they need two looks at the stores, a second apart")];
    const each = (n) => perSecond(n, looked);
    const drops = Object.entries(rates.drops).sort((a, b) => b[1] - a[1]);
    return [
      figure("Load time", rates.loads ? duration(rates.load_seconds / rates.loads) : "no loads", rates.loads ? loadWords(rates) : ""),
      figure("Loaded", speed(rates.loaded_bytes / looked),
        rates.load_seconds ? `${speed(rates.loaded_bytes / rates.load_seconds)} while a request loads` : ""),
      figure("Stored", speed(rates.stored_bytes / looked), `${count(rates.being_written)} chunks are being written`),
      figure("Evicted", each(rates.evicted_chunks), rates.evicted_chunks ? busiest(tiers) || "chunks" : "no chunks"),
      figure("Queue", count(rates.waiting_chunks), "chunks that wait for the disk and remote tiers"),
      figure("Not stored", each(rates.dropped_chunks), drops.length ? `mostly: ${worded(drops[0][0])}` : "no chunks"),
    ];
  });
}

// ---- reasons

export function showReasons(list, reasons, none) {
  show(list, reasons, () => {
    const rows = Object.entries(reasons).sort((a, b) => b[1] - a[1]);
    if (!rows.length) return [make("li", { className: "soft" }, none)];
    return rows.map(([reason, n]) => {
      const bar = make("div");
      bar.style.width = `${(100 * n) / rows[0][1]}%`;
      const line = make("div", { className: "line" }, make("strong", {}, worded(reason)), make("span", { className: "number" }, count(n)));
      return make("li", {}, line, make("div", { className: "bar", ariaHidden: "true" }, bar), make("span", { className: "note" }, meaningOf(reason)));
    });
  });
}

// ---- by model and by tenant

function usageRow(name, row) {
  const saved = row.saved_seconds === null ? "unknown" : duration(row.saved_seconds);
  const cells = [count(row.lookups), percent(row.hit_tokens, row.asked_tokens), short(row.hit_tokens), short(row.asked_tokens), saved];
  return make("tr", {}, make("th", { scope: "row" }, name || "(not named)"), ...cells.map((cell) => make("td", { className: "number" }, cell)));
}

export function showUsage({ models, tenants }) {
  byId("usage").hidden = !models;
  if (!models) return;
  const empty = [make("tr", {}, make("td", { colSpan: 6, className: "soft" }, "No request yet."))];
  const rowsOf = (rows, name) => (rows.length ? rows.map((row) => usageRow(row[name], row)) : empty);
  show(byId("models"), models, () => rowsOf(models, "model"));
  show(byId("tenants"), tenants, () => rowsOf(tenants, "tenant"));
}

// ---- namespaces, pins, settings

// `clear` and `unpin` are what the buttons of a row do.
export function showNamespaces(rows, more, clear) {
  show(byId("namespaces"), [rows, more], () => {
    if (!rows.length) return [make("tr", {}, make("td", { colSpan: 5, className: "soft" }, "No engine has stored anything yet."))];
    const shown = rows.map((row) => {
      const button = make("button", { type: "button", ariaLabel: `Clear ${titleOf(row)}`, onclick: () => clear(row) }, "Clear…");
      const chunks = Object.entries(row.chunks).map(([tier, n]) => `${tier} ${count(n)}`).join(", ") || "0";
      return make("tr", {}, make("th", { scope: "row" }, titleOf(row)), make("td", {}, make("code", {}, row.namespace.slice(0, 12))),
        make("td", { className: "number" }, chunks), make("td", { className: "number" }, bytes(row.bytes)),
        make("td", {}, keyed(button, `clear ${row.namespace}`)));
    });
    if (more) shown.push(make("tr", {}, make("td", { colSpan: 5, className: "soft" }, `and ${count(more)} more: pagoda stats lists them`)));
    return shown;
  });
}

export function showPins(pins, more, unpin) {
  show(byId("pins"), [pins, more], () => {
    if (!pins.length) return [make("p", { className: "soft" }, "Nothing is pinned. Pin a prompt with the question box.")];
    const rows = pins.map((pin) => {
      const button = make("button", { type: "button", ariaLabel: `End the pins of ${pin.owner}`, onclick: () => unpin(pin) }, "Unpin");
      return [pin.tier, pin.owner, count(pin.chunks), keyed(button, `unpin ${pin.tier} ${pin.owner}`)];
    });
    const shown = [table(["Tier", "In whose name", "Chunks", make("span", { className: "hidden" }, "Actions")], rows)];
    if (more) shown.push(make("p", { className: "soft" }, `and ${count(more)} more: pagoda stats lists them`));
    return shown;
  });
}

export function showSettings(settings) {
  show(byId("settings"), settings, () => settings.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

export function showTroubles(troubles) {
  show(byId("troubles"), troubles, () => troubles.map((text) => make("p", { className: "notice" }, text)));
}

// ---- the last requests

// The moment of a request by the clock of the server, in the time zone of this device; with its day
// if that was not today.
function moment(time, serverTime) {
  const at = new Date(1000 * time);
  const day = at.toDateString() === new Date(1000 * serverTime).toDateString() ? "" : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} `;
  return make("time", { dateTime: at.toISOString() }, day + at.toLocaleTimeString("en-GB"));
}

export function showRequests(requests, serverTime) {
  const today = new Date(1000 * serverTime).toDateString();
  show(byId("requests"), [requests, today], () => {
    if (!requests.length) return [make("tr", {}, make("td", { colSpan: 6, className: "soft" }, "No request yet."))];
    return requests.map((row) => {
      const hits = KINDS.filter(([kind]) => row.hit_tokens[kind]).map(([kind]) => `${kind} ${count(row.hit_tokens[kind])}`);
      return make("tr", {}, make("td", {}, moment(row.time, serverTime)), make("td", { className: "number" }, count(row.asked_tokens)),
        make("td", { className: "number hits" }, hits.join(", ") || "0"), make("td", {}, worded(row.reason || "complete")),
        make("td", { className: "model" }, titleOf(row)), make("td", { className: "number" }, `${row.pid}`));
    });
  });
}

// A table that is wider than its place says so: a phone shows no scroll bar.
export function showScrolling() {
  for (const place of document.querySelectorAll(".scroll")) {
    const rest = place.scrollWidth - place.clientWidth - place.scrollLeft;
    const isWide = place.scrollWidth > place.clientWidth + 1;
    place.classList.toggle("more-right", rest > 1);
    place.classList.toggle("more-left", isWide && place.scrollLeft > 1);
    place.nextElementSibling.hidden = !isWide;
  }
}
