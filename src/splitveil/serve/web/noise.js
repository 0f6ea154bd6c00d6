// Random numbers from the browser's cryptographic generator. There is no seed and no switch.

const QUOTA = 65536; // bytes that getRandomValues gives at once

function words(count) {
  const found = new Uint32Array(count);
  const step = QUOTA / 4;
  for (let at = 0; at < count; at += step) {
    crypto.getRandomValues(found.subarray(at, Math.min(at + step, count)));
  }
  return found;
}

// Strictly between 0 and 1, on a grid of 2^-53: 27 bits of one word and 26 of the next.
export function uniforms(count) {
  const drawn = words(2 * count);
  const found = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const cell = (drawn[2 * i] >>> 5) * 2 ** 26 + (drawn[2 * i + 1] >>> 6);
    found[i] = Math.min((cell + 0.5) * 2 ** -53, 1 - 2 ** -53);
  }
  return found;
}

// Standard normals by Box and Muller.
export function normals(count) {
  const pairs = Math.ceil(count / 2);
  const drawn = uniforms(2 * pairs);
  const found = new Float64Array(2 * pairs);
  for (let i = 0; i < pairs; i++) {
    const radius = Math.sqrt(-2 * Math.log(drawn[i]));
    const angle = 2 * Math.PI * drawn[pairs + i];
    found[i] = radius * Math.cos(angle);
    found[pairs + i] = radius * Math.sin(angle);
  }
  return found.subarray(0, count);
}

// Laplace numbers of scale 1: ln u - ln v.
export function laplaces(count) {
  const drawn = uniforms(2 * count);
  return Float64Array.from({ length: count }, (_, i) => Math.log(drawn[i] / drawn[count + i]));
}
