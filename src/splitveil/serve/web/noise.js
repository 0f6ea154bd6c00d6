// Random numbers from words, by default the browser's cryptographic generator's. The page takes them
// from `draws.js`, so that a picture is sent with the same draw again.

import { TABLES } from "./tables.js";

const QUOTA = 65536; // bytes that getRandomValues gives at once

export function words(count) {
  const found = new Uint32Array(count);
  const step = QUOTA / 4;
  for (let at = 0; at < count; at += step) {
    crypto.getRandomValues(found.subarray(at, Math.min(at + step, count)));
  }
  return found;
}

// Strictly between 0 and 1, on a grid of 2^-53: 27 bits of one word and 26 of the next.
export function uniforms(count, draw = words) {
  const drawn = draw(2 * count);
  const found = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const cell = (drawn[2 * i] >>> 5) * 2 ** 26 + (drawn[2 * i + 1] >>> 6);
    found[i] = Math.min((cell + 0.5) * 2 ** -53, 1 - 2 ** -53);
  }
  return found;
}

// Upper and lower halves of the words of a table, as two arrays.
function halves(hex) {
  const half = hex.map((word) => [parseInt(word.slice(0, 8), 16), parseInt(word.slice(8), 16)]);
  const rest = half.map(([high, low]) => [~high >>> 0, ~low >>> 0]).reverse();
  const whole = [...half, ...rest];
  return [Uint32Array.from(whole, (w) => w[0]), Uint32Array.from(whole, (w) => w[1])];
}

const CELLS = Object.fromEntries(Object.entries(TABLES).map(([kind, hex]) => [kind, halves(hex)]));

// Rounded standard noise in steps of a sixteenth, as splitveil/grid.py makes it: how many cells end
// at or below a uniform word of 64 bits (lower half first), less half of the cells.
export function noiseSteps(count, kind, draw = words) {
  const [high, low] = CELLS[kind];
  const drawn = draw(2 * count);
  const found = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const [below, above] = [drawn[2 * i], drawn[2 * i + 1]];
    let [from, to] = [0, high.length];
    while (from < to) {
      const at = (from + to) >>> 1;
      if (high[at] < above || (high[at] === above && low[at] <= below)) from = at + 1;
      else to = at;
    }
    found[i] = from - high.length / 2;
  }
  return found;
}
