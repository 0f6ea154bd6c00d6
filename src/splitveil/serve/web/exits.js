// When the device answers alone: the exit rule, as splitveil/serve/exits.py decides.

const FINE = 2 ** -40; // of sureness: the last bits differ between libraries and decide nothing
const RULE = "average changed int8 kind levels send sends temperature thresholds";

// Why a rule cannot be followed is an error: a page that did not know it could send too much.
export function checkRule(rule, classes) {
  const known = Object.keys(rule).sort().join(" ") === RULE && rule.sends === "unsure";
  const numbers = [rule.temperature, ...(rule.thresholds ?? [])];
  const whole = numbers.length === classes + 1 && numbers.every(Number.isFinite);
  if (!known || !Object.hasOwn(SURENESS, rule.kind) || !whole || !(rule.temperature > 0)) {
    throw new Error("The page does not know this exit rule, so it sends nothing; use splitveil infer.");
  }
}

const SURENESS = {
  confidence: (p) => Math.max(...p),
  margin: (p) => {
    const [second, first] = p.slice().sort((a, b) => a - b).slice(-2);
    return first - second;
  },
  entropy: (p) => p.reduce((sum, v) => sum + (v > 0 ? v * Math.log(v) : 0), 0),
};

function scaled(logits, temperature) {
  const found = Array.from(logits, (v) => v / temperature);
  const most = Math.max(...found);
  return found.map((v) => v - most);
}

// Log-probabilities of logits at a temperature.
export function logSoftmax(logits, temperature = 1) {
  const shifted = scaled(logits, temperature);
  const total = Math.log(shifted.reduce((sum, v) => sum + Math.exp(v), 0));
  return shifted.map((v) => v - total);
}

// How sure an answer is: largest probability, lead over the second, or minus entropy.
export function sureness(logits, kind, temperature) {
  const powers = scaled(logits, temperature).map(Math.exp);
  const total = powers.reduce((sum, v) => sum + v, 0);
  return SURENESS[kind](powers.map((v) => v / total));
}

// Whether a picture is sent, from the client's own logits.
export function asks(own, rule) {
  if (!Array.from(own).every(Number.isFinite)) {
    throw new Error("The client's own head gives numbers that are not finite. Nothing is sent.");
  }
  const threshold = rule.thresholds[own.indexOf(Math.max(...own))];
  return threshold - sureness(own, rule.kind, rule.temperature) > FINE;
}

// The log-probabilities that the device reports; `server` is null where it did not answer.
export function answers(own, server, rule) {
  const mine = logSoftmax(own, rule.temperature);
  if (server === null) return mine;
  const theirs = logSoftmax(server);
  return rule.average ? mine.map((v, k) => (v + theirs[k]) / 2) : theirs;
}
