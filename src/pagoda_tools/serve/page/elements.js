// Makes elements, and text from numbers. Every module of the page calls it; it calls none.

const SVG = "http://www.w3.org/2000/svg";

export const KINDS = [["host", "host memory"], ["disk", "disk"], ["remote", "remote"]];

export const byId = (id) => document.getElementById(id);

export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export function draw(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Replaces the children only if `state`, which they are made from, has changed. An element with a
// data-key keeps the focus; a <details> with one stays open.
export function show(parent, state, children) {
  const text = JSON.stringify(state);
  if (parent.dataset.shown === text) return;
  parent.dataset.shown = text;
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const open = [...parent.querySelectorAll("details[open]")].map((one) => one.dataset.key);
  parent.replaceChildren(...children());
  for (const one of parent.querySelectorAll("[data-key]")) {
    if (one.tagName === "DETAILS" && open.includes(one.dataset.key)) one.open = true;
    if (focused && one.tagName !== "DETAILS" && one.dataset.key === focused) one.focus();
  }
}

export function keyed(element, key) {
  element.dataset.key = key;
  return element;
}

export function table(columns, rows) {
  const heading = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))));
  return make("table", {}, make("thead", {}, heading), make("tbody", {}, ...body));
}

// ---- numbers

export const count = (n) => Math.round(n).toLocaleString("en");

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const short = (n) => compact.format(n);

// Nothing but all of it is 100 %, and only nothing is 0 %.
export function percent(part, whole) {
  if (!whole) return "none yet";
  const share = (100 * part) / whole;
  const digits = share < 10 || (share > 99 && share < 100) ? 1 : 0;
  if (part && share < 0.05) return "<0.1 %";
  if (part < whole && share >= 99.95) return ">99.9 %";
  return `${share.toFixed(part ? digits : 0)} %`;
}

export function bytes(n) {
  if (n === null || n === undefined) return "unknown";
  let unit = 0;
  while (n >= 1024 && unit < 5) {
    n /= 1024;
    unit += 1;
  }
  return `${unit && n < 100 ? n.toFixed(1) : Math.round(n)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

// Decimal units, as people write speeds.
export function speed(bytesPerSecond) {
  let n = bytesPerSecond;
  let unit = 0;
  while (n >= 1000 && unit < 4) {
    n /= 1000;
    unit += 1;
  }
  return `${unit && n < 100 ? n.toFixed(1) : Math.round(n)} ${["B", "kB", "MB", "GB", "TB"][unit]}/s`;
}

export function perSecond(n, seconds) {
  const rate = n / seconds;
  if (!n) return "0/s";
  return `${rate < 0.01 ? "<0.01" : rate < 10 ? rate.toPrecision(2) : short(rate)}/s`;
}

export function duration(seconds) {
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds > 0 && seconds < 0.0005) return "<1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  for (const [limit, divisor, unit] of [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]])
    if (seconds < limit) return `${(seconds / divisor).toFixed(seconds < 10 * divisor ? 1 : 0)} ${unit}`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

// How long ago, in whole units: it is read while it counts.
export function age(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

// What tells a namespace apart: its model and whatever is set beside it. Of a salt, the fields have
// only a digest.
export function titleOf({ fields }) {
  const names = ["revision", "kv_dtype", "lora", "salt"].filter((name) => fields[name]);
  const beside = names.map((name) => `${name}=${fields[name]}`);
  if ((fields.weights_epoch || "0") !== "0") beside.push(`weights_epoch=${fields.weights_epoch}`);
  return [fields.model || "(not named)", ...beside].join(" ");
}
