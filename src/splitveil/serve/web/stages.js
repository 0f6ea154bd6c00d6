// The channel: what is done to the smashed data of one image before they leave the page.
// The same stages as splitveil/serve/stages.py; one that is not known here is refused.

import { noiseSteps, uniforms, words } from "./noise.js";

const { fround } = Math;
const REACH = 2 ** 22; // the largest step number of z, so that its float is exact

// Halves go to the even neighbour, as in Python and numpy.
export function roundHalfEven(x) {
  const low = Math.floor(x);
  const rest = x - low;
  if (rest !== 0.5) return rest < 0.5 ? low : low + 1;
  return low % 2 === 0 ? low : low + 1;
}

// z rounded to the grid of noise of a scale (per number), and fresh rounded noise, in floats that are
// multiples of the grid's step.
function withNoiseOnGrid(values, scaleOf, kind, draw) {
  if (!values.every(Number.isFinite)) {
    throw new Error("The network gives numbers that are not finite. Nothing is sent.");
  }
  const drawn = noiseSteps(values.length, kind, draw);
  return Float32Array.from(values, (v, i) => {
    const step = fround(scaleOf(i)) / 16;
    const q = Math.min(Math.max(roundHalfEven(v / step), -REACH), REACH);
    return (q + drawn[i]) * step;
  });
}

function gaussian(z, stage, draw) {
  return stage.std === 0 ? z : withNoiseOnGrid(z, () => stage.std, "gaussian", draw);
}

function dropout(z, stage, draw) {
  const drawn = uniforms(z.length, draw);
  return z.map((v, i) => (drawn[i] < stage.p ? 0 : v));
}

function topk(z, stage) {
  const order = Array.from(z.keys()).sort((a, b) => Math.abs(z[a]) - Math.abs(z[b]));
  const found = z.slice();
  for (const i of order.slice(0, roundHalfEven(stage.prune * z.length))) found[i] = 0;
  return found;
}

function quantise(z, stage) {
  const steps = 2 ** stage.bits - 1;
  return z.map((v) => roundHalfEven(fround(Math.min(Math.max(v, 0), 1) * steps)) / steps);
}

function clip(z, stage) {
  return z.map((v) => Math.min(Math.max(v, fround(stage.low)), fround(stage.high)));
}

function learned(z, stage, draw) {
  const moved = Float64Array.from(z, (v, i) => v + stage.location[i]);
  return withNoiseOnGrid(moved, (i) => stage.scale[i], stage.noise, draw);
}

const NOISES = { gaussian: "Gaussian", laplace: "Laplace" };

export const STAGES = {
  gaussian: { apply: gaussian, numbers: ["std"], words: (s) => `Gaussian noise, σ ${short(s.std)}` },
  dropout: { apply: dropout, numbers: ["p"], words: (s) => `${short(100 * s.p)} % dropped` },
  topk: { apply: topk, numbers: ["prune"], words: (s) => `the smallest ${short(100 * s.prune)} % pruned` },
  quantise: { apply: quantise, numbers: ["bits"], words: (s) => `rounded to ${2 ** s.bits} levels` },
  clip: { apply: clip, numbers: ["low", "high"], words: (s) => `clipped to ${s.low} … ${s.high}` },
  learned: { apply: learned, numbers: ["std"], words: (s) => `learned ${NOISES[s.noise]} noise, σ ${short(s.std)}` },
};

function short(value) {
  return String(Number(value.toPrecision(3)));
}

// Refuses what would send more than was audited.
export function checkStages(stages) {
  for (const stage of stages) {
    const known = Object.hasOwn(STAGES, stage?.kind) ? STAGES[stage.kind] : null;
    if (!known) {
      throw new Error(
        `The channel has a stage this page does not know: ${JSON.stringify(stage)}. ` +
          "Nothing will be sent. Serve the export with the version of SplitVeil that made it.",
      );
    }
    if (!known.numbers.every((key) => Number.isFinite(stage[key]))) {
      throw new Error(`The channel's stage ${JSON.stringify(stage)} is not complete.`);
    }
    if (stage.kind === "learned" && !Object.hasOwn(NOISES, stage.noise)) {
      throw new Error(`The channel has noise this page does not know: ${stage.noise}.`);
    }
  }
}

// A learned stage with the numbers of its file: scales, then locations.
export function withNoise(stage, content, size) {
  if (content.byteLength !== 8 * size) throw new Error(`${stage.file} has the wrong size.`);
  const numbers = new Float32Array(content);
  const [scale, location] = [numbers.subarray(0, size), numbers.subarray(size)];
  if (!numbers.every(Number.isFinite) || !scale.every((s) => s > 0)) {
    throw new Error(`${stage.file} holds noise that is not finite or has no scale.`);
  }
  return { ...stage, scale, location };
}

// Random words that the stages take at most for smashed data of a size.
export function wordsNeeded(size, stages) {
  return 2 * size * stages.length;
}

// What is sent for smashed data z (Float32Array). `draw(n)` gives n random words; by default every
// call draws anew.
export function applyStages(z, stages, draw = words) {
  checkStages(stages);
  const apply = (sent, stage) => STAGES[stage.kind].apply(sent, stage, draw);
  return stages.reduce(apply, Float32Array.from(z));
}

export function channelInWords(stages) {
  return stages.length ? stages.map((s) => STAGES[s.kind].words(s)).join(", then ") : "nothing is done to it";
}
