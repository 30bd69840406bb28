// Whether the figures on the page are those of now. `page.js` tells it what arrives, and asks it.
//
// The page says "live" only while events come: figures that look fresh and are not are worse than
// none. Two clocks of this device are asked how long nothing came, and the later one is believed:
// one stands still while a laptop sleeps, the other is set by people. The server's clock is not
// compared: every event says how old its figures were when it was sent.

import { age } from "./elements.js";

export const FRESH_SECONDS = 3;
const SILENT_SECONDS = 10; // then the connection is taken for dead: a sleeping laptop is told nothing

export class Freshness {
  constructor() {
    this.connection = "connecting"; // or "open", "lost", "out": a login is needed
    this.reason = "";
    this.sentAge = 0;
    this.arrivedAt = null;
  }

  arrived(sentAge) {
    this.connection = "open";
    this.sentAge = sentAge || 0;
    this.arrivedAt = [performance.now(), Date.now()];
  }

  opened() {
    this.openedAt = [performance.now(), Date.now()];
  }

  // Seconds since the moment that the figures are of; null: there are none yet.
  age() {
    return this.arrivedAt === null ? null : since(this.arrivedAt) + this.sentAge;
  }

  isFresh() {
    return this.connection === "open" && this.age() !== null && this.age() <= FRESH_SECONDS;
  }

  isSilent() {
    const heard = this.arrivedAt === null ? Infinity : since(this.arrivedAt);
    return Math.min(heard, since(this.openedAt)) > SILENT_SECONDS;
  }

  // The state for people: a class, words, and what counts on every second.
  words() {
    const old = this.age();
    const counting = old === null ? "" : ` for ${age(old)}`;
    if (this.connection === "out") return ["lost", "a login is needed", old === null ? "" : `, no data${counting}`];
    if (this.connection === "lost")
      return ["lost", "no connection to pagoda serve", `${counting}: ${this.reason || "trying again"}`];
    if (old === null) return ["waiting", "connecting", ""];
    if (old <= FRESH_SECONDS) return ["here", "live", ""];
    if (this.sentAge > FRESH_SECONDS) return ["lost", "the stores do not answer", `: no data${counting}`];
    return ["lost", "no data", counting];
  }
}


function since([steady, wall]) {
  return Math.max(0, performance.now() - steady, Date.now() - wall) / 1000;
}

// How far this device's clock is ahead of the server's, in seconds. The least of the last events: the
// others came late.
export class ClockDifference {
  constructor() {
    this.seen = [];
  }

  note(serverTime) {
    this.seen = [...this.seen, Date.now() / 1000 - serverTime].slice(-10);
  }

  seconds() {
    return this.seen.length ? Math.min(...this.seen) : 0;
  }
}
