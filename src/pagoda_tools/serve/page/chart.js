// The chart of tokens served. `page.js` gives it the spans of the server and calls showChart.
//
// Its axis is the server machine's time since its start, so neither clock of day matters. Where the
// server did not look (it was stopped, the machine slept, a store did not answer) the chart is
// hatched: nothing is known, and no line is drawn.

import { KINDS, age, byId, count, draw, make, short } from "./elements.js";

const WIDTH = 600;
const HEIGHT = 160;
const NOW_SECONDS = 2;
const LEAST_PAUSE = 0.01; // seconds between two spans that are a gap

export const VIEWS = { minutes: 300, hour: 3600, day: 86400 };

let seconds = [];
let minutes = [];

export function replaceSpans(history) {
  seconds = history;
}

// A stream begins with a history, which may have the first of them already.
export function addSpans(spans) {
  const last = seconds.length ? seconds.at(-1).end : -Infinity;
  const added = [...seconds, ...spans.filter((span) => span.end > last)];
  seconds = added.filter((span) => span.end > added.at(-1).end - VIEWS.minutes);
}

export function replaceMinutes(spans) {
  minutes = spans;
}

// What is going on now: the span that has just ended; null if nobody looked.
export function newestSpan(now) {
  const last = seconds.at(-1);
  return last && now - last.end < NOW_SECONDS ? last : null;
}

function spansOf(view) {
  if (view === "minutes" || !minutes.length) return seconds;
  const known = minutes.at(-1).end;
  return [...minutes, ...seconds.filter((span) => span.end - span.seconds > known - LEAST_PAUSE)];
}

const rate = (span, kind) => (span.seconds ? (span.hit_tokens[kind] || 0) / span.seconds : 0);

// Runs of spans without a pause between them: [begin, end].
function lookedAt(spans) {
  const runs = [];
  for (const span of spans) {
    const begin = span.end - span.seconds;
    if (runs.length && begin - runs.at(-1)[1] < LEAST_PAUSE) runs.at(-1)[1] = span.end;
    else runs.push([begin, span.end]);
  }
  return runs;
}

// `now`: the server's machine time that the right edge stands for; `old`: how long ago that is, or 0.
export function showChart(now, view, old) {
  const wide = VIEWS[view];
  const begin = now - wide;
  const spans = spansOf(view).filter((span) => span.end > begin);
  const x = (time) => Math.min(WIDTH, Math.max(0, (WIDTH * (time - begin)) / wide));
  const most = Math.max(1, ...spans.map((span) => KINDS.reduce((sum, [kind]) => sum + rate(span, kind), 0)));
  const y = (value) => HEIGHT * (1 - value / most);
  const runs = lookedAt(spans);
  const unknown = wide - runs.reduce((sum, [from, to]) => sum + to - Math.max(from, begin), 0);
  const picture = draw("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": chartWords(spans, most, wide, unknown),
  });
  const stripe = draw("path", { class: "stripe", d: "M-2 10L10 -2M4 16L16 4" });
  picture.append(draw("defs", {}, draw("pattern", { id: "unlooked", width: 12, height: 12, patternUnits: "userSpaceOnUse" }, stripe)));
  picture.append(draw("rect", { width: WIDTH, height: HEIGHT, fill: "url(#unlooked)" }));
  for (const [from, to] of runs) {
    const left = x(from);
    picture.append(draw("rect", { class: "looked", x: left, width: Math.max(0, x(to) - left), height: HEIGHT }));
  }
  for (const part of [0.25, 0.5, 0.75]) picture.append(line(HEIGHT * part));
  const floor = spans.map(() => 0);
  for (const [kind] of KINDS) {
    let path = "";
    spans.forEach((span, n) => {
      const low = floor[n];
      const high = low + rate(span, kind);
      floor[n] = high;
      if (high === low) return;
      const left = x(span.end - span.seconds);
      const right = Math.max(x(span.end), left + 0.6);
      path += `M${left.toFixed(2)} ${y(low).toFixed(1)}V${y(high).toFixed(1)}H${right.toFixed(2)}V${y(low).toFixed(1)}z`;
    });
    picture.append(draw("path", { class: kind, d: path }));
  }
  picture.append(line(HEIGHT - 0.5));
  const top = most > 1 ? `top of the chart: ${short(most)} tokens/s` : "nothing was served in this time";
  const edge = old ? `${age(old)} ago` : "now";
  const labels = [`${age(wide)} ${old ? "before" : "ago"}`, runs.length ? top : "not looked at", edge];
  byId("chart").replaceChildren(picture, make("p", { className: "labels" }, ...labels.map((text) => make("span", {}, text))));
  byId("unlooked-legend").hidden = unknown < 1;
}

function line(y) {
  return draw("line", { x1: 0, x2: WIDTH, y1: y, y2: y, "vector-effect": "non-scaling-stroke" });
}

function chartWords(spans, most, wide, unknown) {
  const sums = KINDS.map(([kind, title]) => `${title} ${count(spans.reduce((sum, span) => sum + (span.hit_tokens[kind] || 0), 0))}`);
  const gap = unknown < 1 ? "" : `; of ${age(unknown)} of it nothing is known`;
  return `Tokens served in ${age(wide)}, by tier: ${sums.join(", ")}; at most ${count(most > 1 ? most : 0)} per second${gap}`;
}
