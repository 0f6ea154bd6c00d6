// The page: a picture in, its smashed data out, the answer back, and what an attacker makes of it.

import { answers, asks } from "./exits.js";
import { keyOf, loadModel } from "./model.js";
import { Picture } from "./picture.js";
import { bars, heatMap, paint, ramp, softmax } from "./show.js";
import { channelInWords } from "./stages.js";
import { encodeRequest, infer } from "./wire.js";

const at = (id) => document.getElementById(id);
const told = document.body.dataset;
let token = ""; // in memory only, gone with the page
const sentOf = new Map(); // by picture: whether it was sent

const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});
const count = (n, word) => `${n.toLocaleString("en-GB")} ${word}`;

function say(text, kind = "") {
  at("status").textContent = text;
  at("status").className = kind;
}

function fail(error) {
  say(error.message, "bad");
}

function describe(manifest) {
  const [channels, height, width] = manifest.image_shape;
  at("takes").textContent =
    `'${manifest.name}' takes ${width} × ${height} pixels in ${channels === 1 ? "grey" : "colour"}.`;
  at("channel").textContent = `Before it leaves: ${channelInWords(manifest.stages)}. ` +
    "Randomness comes from this browser's cryptographic generator. A picture that is sent again gets " +
    "the same noise; for that the browser keeps a keyed hash and a random seed of it, not the picture.";
  const rule = manifest.exit;
  at("send").textContent = rule ? "Answer" : "Send what leaves";
  at("rule").hidden = !rule;
  if (rule) {
    at("intro").textContent =
      "A network runs in this page and answers what it is sure of. Of any other picture it makes a few " +
      "noisy numbers, and only they go to the server. The picture stays here.";
    at("from").textContent =
      "From this device, or from the server, which sees only the numbers of what the device is not sure of.";
    at("rule").textContent =
      "This device answers what it is sure of. Only a picture that it is not sure of leaves" +
      (rule.send === null ? "." : `: about ${Math.round(100 * rule.send)} % of them.`);
  }
  const audit = manifest.audit;
  const mse = audit?.strongest?.mse;
  at("audit").textContent = Number.isFinite(mse)
    ? `The audit's strongest attack had a mean squared error of ${mse.toFixed(4)} per pixel; ` +
      `knowing nothing but the class gives ${Number(audit.ceiling?.mse).toFixed(4)}.`
    : "The export carries no audit: nobody has measured what the wire gives away.";
}

function showAttacker(model) {
  const facts = model.manifest.attacker;
  at("attacker-missing").hidden = model.attack !== null;
  at("attacker").hidden = model.attack === null;
  if (facts) {
    at("attacker-who").textContent =
      `A network fitted to undo this client ('${facts.attack}' of the audit). ` +
      "It sees the bytes that leave, nothing else.";
  }
}

async function shown(model, picture, sent, request, again) {
  const { low, high } = heatMap(at("heat"), sent, model.manifest.wire_shape);
  at("low").textContent = low.toFixed(2);
  at("high").textContent = high.toFixed(2);
  at("leaves").hidden = false;
  at("bytes").textContent =
    `${count(sent.length, "numbers")}, ${count(request.numberBytes, "bytes")}, and ` +
    `${count(request.headerBytes, "bytes")} that describe them. The picture has ` +
    `${count(picture.length, "numbers")}; none of them leaves.` +
    (again ? " This picture was sent before: it got the same noise, so that it cannot be averaged away." : "");
  at("header").textContent = request.header;
  if (!model.attack) return;
  const guess = await model.attack(sent);
  paint(at("guess"), guess, model.manifest.image_shape);
  const error = picture.reduce((sum, v, i) => sum + (v - guess[i]) ** 2, 0) / picture.length;
  at("error").textContent = `Mean squared error of this one: ${error.toFixed(4)} per pixel.`;
  at("reconstruction").hidden = false;
}

const FROM = {
  server: "From the server, which has the second half and has seen only the numbers.",
  device: "From this device, which is sure of it. Nothing was sent.",
  away: "From this device, which is not sure of it; the server could not be reached.",
};

// What the server answers for a picture; null if it cannot be reached and the device can answer.
async function ask(model, values, z) {
  const { manifest } = model;
  const { sent, again } = await model.send(values, z);
  const request = encodeRequest(sent, manifest);
  await shown(model, values, sent, request, again);
  say("Waiting for the server …");
  try {
    return await infer(manifest.name, request, manifest.num_classes, headers());
  } catch (error) {
    if (manifest.exit && error instanceof TypeError) return null; // fetch: no connection
    throw error;
  }
}

function countKept(key, sent) {
  if (sent || !sentOf.has(key)) sentOf.set(key, sent);
  const kept = Array.from(sentOf.values()).filter((left) => !left).length;
  at("kept").textContent = `${kept} of ${count(sentOf.size, "pictures")} never left this device.`;
  at("kept").hidden = false;
}

async function send(model, picture) {
  const { manifest } = model;
  at("send").disabled = true;
  try {
    say("Encoding in the page …");
    const values = picture.values.slice();
    const [z, own] = await model.encode(values);
    const [key, rule] = [keyOf(values), manifest.exit];
    const asked = !rule || asks(own, rule);
    at("leaves").hidden = at("reconstruction").hidden = true;
    if (rule) countKept(key, asked);
    const server = asked ? await ask(model, values, z) : null;
    const logits = rule ? answers(own, server, rule) : server;
    at("from").textContent = FROM[server ? "server" : asked ? "away" : "device"];
    const nameOf = (k) => manifest.classes?.[k] ?? `class ${k}`;
    at("answer").textContent = nameOf(bars(at("classes"), softmax(logits), nameOf));
    at("answer-part").hidden = false;
    say("Answered.", "good");
  } catch (error) {
    fail(error);
  }
  at("send").disabled = false;
}

function prepare(model) {
  const picture = new Picture(at("picture"), model.manifest.image_shape, () => {
    at("picture").hidden = false;
    at("send").disabled = false;
  });
  at("picture").hidden = !picture.drawable; // an empty square would look like a broken picture
  at("draw-hint").hidden = !picture.drawable;
  at("clear").hidden = !picture.drawable;
  at("invert").hidden = model.manifest.image_shape[0] !== 1;
  if (picture.drawable) {
    at("picture").tabIndex = 0;
    at("picture").setAttribute("role", "application");
    at("picture").setAttribute("aria-describedby", "draw-hint");
  }
  at("clear").addEventListener("click", () => {
    picture.clear();
    at("taken").textContent = "";
  });
  at("invert").addEventListener("click", () => picture.invert());
  at("file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    try {
      const { width, height, cropped } = await picture.take(file);
      at("taken").textContent =
        width === picture.width && height === picture.height
          ? "The file has the network's size; its pixels go in as they are."
          : `${width} × ${height}${cropped ? ", cut to its middle and" : ""} scaled to ` +
            `${picture.width} × ${picture.height} in this page. What you see above is what goes in.`;
      say("");
    } catch {
      fail(new Error(`${file.name} cannot be read as a picture; choose a PNG or JPEG.`));
    }
  });
  at("send").addEventListener("click", () => send(model, picture));
  at("work").hidden = false;
}

async function start() {
  say("Loading the client's half into the page …");
  try {
    const model = await loadModel(headers());
    describe(model.manifest);
    showAttacker(model);
    ramp(at("ramp"));
    prepare(model);
    at("token-form").hidden = true;
    say("Ready. The network runs in this page.");
    document.body.dataset.state = "ready";
  } catch (error) {
    fail(error);
  }
}

if (told.runtime === "missing") {
  at("runtime-missing").hidden = false;
  say("");
} else if (told.token === "needed") {
  at("token-form").hidden = false;
  say("");
  at("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    token = at("token").value;
    at("token").value = "";
    start();
  });
} else {
  start();
}
