// The tiers: a pagoda with a storey for each, its windows lit as far as it is full, and the figures
// beside it. `page.js` calls showTower.

import { age, byId, bytes, count, draw, keyed, make, perSecond, percent, short, show } from "./elements.js";

const WIDTH = 240;
const MIDDLE = WIDTH / 2;
const STOREY = 82; // the height of a storey, in units of the picture
const SPIRE = 34;
const BASE = 14;
const WINDOWS = 10;

// The size that a tier or a store has when it has grown: one that grows is not full at its first piece.
const sizeOf = (one) => one.most_bytes || one.size_bytes;
const shareOf = (tier) => (sizeOf(tier) && tier.used_bytes !== null ? tier.used_bytes / sizeOf(tier) : null);
const halfWidth = (index, storeys) => 46 + Math.min(48, index * Math.max(9, 44 / Math.max(1, storeys - 1)));

function spire() {
  return draw("g", {},
    draw("path", { class: "roof", d: "M118 34V14h4v20z" }),
    draw("circle", { class: "lamp", cx: MIDDLE, cy: 11, r: 5 }),
    draw("path", { class: "roof", d: "M113 20h14v3h-14zM111 27h18v3h-18z" }));
}

function roof(w) {
  const eave = w + 24;
  const top = w * 0.62;
  return `M${MIDDLE - eave} 27C${MIDDLE - w} 26 ${MIDDLE - top - 6} 18 ${MIDDLE - top} 2H${MIDDLE + top}` +
    `C${MIDDLE + top + 6} 18 ${MIDDLE + w} 26 ${MIDDLE + eave} 27C${MIDDLE + w + 8} 36 ${MIDDLE + w} 35 ${MIDDLE + w - 6} 36` +
    `H${MIDDLE - w + 6}C${MIDDLE - w} 35 ${MIDDLE - w - 8} 36 ${MIDDLE - eave} 27Z`;
}

function storeyPicture(tier, index, storeys, isServing) {
  const w = halfWidth(index, storeys);
  const share = shareOf(tier);
  const classes = ["floor", share === null ? "unknown" : "", isServing ? "serving" : "", tier.trouble ? "silent" : ""];
  const picture = draw("g", { class: classes.join(" "), transform: `translate(0 ${SPIRE + index * STOREY})` },
    draw("rect", { class: "wall", x: MIDDLE - w + 8, y: 35, width: 2 * w - 16, height: STOREY - 35 }),
    draw("path", { class: "roof", d: roof(w) }));
  const room = 2 * w - 28;
  const step = room / WINDOWS;
  const lit = share === null ? 0 : Math.ceil(share * WINDOWS - 1e-9);
  for (let n = 0; n < WINDOWS; n += 1) {
    const x = MIDDLE - room / 2 + n * step + step * 0.15;
    const shape = { x, y: 46, width: step * 0.7, height: 26, rx: step * 0.3 };
    picture.append(draw("rect", { class: n < lit ? "window lit" : "window", ...shape }));
  }
  return picture;
}

function base(half, top) {
  const steps = [[half + 10, 0], [half + 22, 7]];
  return draw("g", {}, ...steps.map(([w, y]) => draw("rect", { class: "stone", x: MIDDLE - w, y: top + y, width: 2 * w, height: 7 })));
}

// One picture, so that it keeps its shape however long the words beside it are.
function pagoda(tiers, rates) {
  const bottom = SPIRE + tiers.length * STOREY;
  const floors = tiers.map((tier, index) => storeyPicture(tier, index, tiers.length, rates[index] > 0));
  return draw("svg", { viewBox: `0 0 ${WIDTH} ${bottom + BASE}`, "aria-hidden": "true" },
    spire(), ...floors, base(halfWidth(tiers.length - 1, tiers.length), bottom));
}

// ---- the words

const nameOf = (store) => (store.models.length ? store.models.join(", ") : "no model yet");

function evicting(store) {
  if (store.evicted_per_second === null) return "";
  return store.evicted_per_second ? `, evicts ${perSecond(store.evicted_per_second, 1)}` : ", evicts nothing";
}

function storeWords(store) {
  const old = store.read_seconds_ago === null ? "" : ` (not read for ${age(store.read_seconds_ago)})`;
  return `${percent(store.used_bytes, sizeOf(store))} of ${bytes(sizeOf(store))} full${evicting(store)}${old}`;
}

// A sum hides a store that is full and evicts: the fullest one is named beside it.
function storeLines(tier) {
  const stores = tier.stores || [];
  const number = stores.length + (tier.more_stores || 0);
  if (number < 2) return [];
  const fullest = make("p", { className: "fullest" }, make("strong", {}, "fullest: "), `${nameOf(stores[0])}: ${storeWords(stores[0])}`);
  const rows = stores.map((store) => make("li", {}, make("strong", {}, nameOf(store)), `: ${storeWords(store)}`,
    make("br"), make("code", {}, [store.name, store.directory].filter(Boolean).join(" "))));
  if (tier.more_stores) rows.push(make("li", {}, `and ${count(tier.more_stores)} more: pagoda stats lists them`));
  const all = make("details", {}, keyed(make("summary", {}, `all ${count(number)} stores`), `summary ${tier.title}`), make("ul", {}, ...rows));
  return [fullest, keyed(all, `stores ${tier.title}`)];
}

function fullness(tier) {
  if (shareOf(tier) !== null) return `${percent(tier.used_bytes, sizeOf(tier))} full`;
  return tier.used_bytes === null ? "fill unknown" : bytes(tier.used_bytes);
}

function storey(tier, rate) {
  const facts = [make("h3", { className: tier.kind }, tier.title)];
  const number = (tier.stores || []).length + (tier.more_stores || 0);
  facts.push(make("p", { className: "full" }, fullness(tier)));
  const words = (...text) => facts.push(make("p", { className: "soft" }, ...text));
  if (shareOf(tier) !== null) {
    const chunks = tier.chunks === null ? "" : `, ${count(tier.chunks)} chunks`;
    const growing = sizeOf(tier) > tier.size_bytes ? ` (${bytes(tier.size_bytes)} taken, it grows)` : "";
    words(`${bytes(tier.used_bytes)} of ${bytes(sizeOf(tier))}${growing}${chunks}${number > 1 ? `, ${count(number)} stores together` : ""}`);
  }
  facts.push(...storeLines(tier));
  if (tier.address) words(make("code", {}, tier.address));
  if (tier.answered_seconds_ago > 45) words(`its last answer is ${age(tier.answered_seconds_ago)} old`);
  if (tier.trouble) facts.push(make("p", { className: "trouble" }, tier.trouble));
  if (tier.hit_tokens !== null) words(`${short(tier.hit_tokens)} tokens served${rate ? `, ${short(rate)}/s now` : ""}`);
  return make("li", { className: tier.trouble ? "storey silent" : "storey" }, ...facts);
}

// `last`: the span that ended just now, or null if nobody knows what happens now.
export function showTower(tiers, last) {
  const rates = tiers.map((tier) => (tier.hit_tokens !== null && last ? (last.hit_tokens[tier.kind] || 0) / last.seconds : 0));
  show(byId("tower"), [tiers.map((tier) => [shareOf(tier), Boolean(tier.trouble)]), rates.map(Boolean)],
    () => (tiers.length ? [pagoda(tiers, rates)] : []));
  show(byId("storeys"), [tiers, rates], () => {
    if (!tiers.length) return [make("li", { className: "soft" }, "Nothing is stored yet. Start an engine with PagodaKV, and its tiers appear here.")];
    return tiers.map((tier, index) => storey(tier, rates[index]));
  });
}
