// The export as the page uses it: its manifest, the client's network, and the attacker's.

import { openDraws } from "./draws.js";
import { checkRule } from "./exits.js";
import { applyStages, checkStages, withNoise, wordsNeeded } from "./stages.js";
import { refusal } from "./wire.js";

async function fetched(file, headers) {
  const reply = await fetch(new URL(`../export/${file}`, import.meta.url), {
    headers,
    credentials: "omit",
  });
  if (!reply.ok) throw new Error(await refusal(reply));
  return reply;
}

async function content(file, manifest, headers) {
  const bytes = await (await fetched(file, headers)).arrayBuffer();
  if (crypto.subtle) {
    // Browsers have it on https and localhost only.
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
    const hex = Array.from(digest, (b) => b.toString(16).padStart(2, "0")).join("");
    if (hex !== manifest.files[file]) throw new Error(`${file} is not the file that was exported.`);
  }
  return bytes;
}

async function runtime() {
  const ort = await import("./ort/ort.wasm.min.mjs");
  ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;
  ort.env.wasm.numThreads = 1; // more need headers that a plain server does not send
  ort.env.logLevel = "error";
  return ort;
}

async function network(ort, bytes, shape) {
  const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  return async (values) => {
    const given = { [session.inputNames[0]]: new ort.Tensor("float32", values, [1, ...shape]) };
    const found = await session.run(given);
    return session.outputNames.map((name) => found[name].data);
  };
}

export async function loadModel(headers) {
  const manifest = await (await fetched("manifest.json", headers)).json();
  if (manifest.exit) checkRule(manifest.exit, manifest.num_classes);
  checkStages(manifest.stages);
  const size = manifest.wire_shape.reduce((a, b) => a * b, 1);
  const stages = await Promise.all(
    manifest.stages.map(async (stage) =>
      stage.kind === "learned"
        ? withNoise(stage, await content(stage.file, manifest, headers), size)
        : stage,
    ),
  );
  const ort = await runtime();
  const encoder = await network(
    ort,
    await content("client.onnx", manifest, headers),
    manifest.image_shape,
  );
  const attacker = manifest.files["attacker.onnx"]
    ? await network(
        ort,
        await content("attacker.onnx", manifest, headers),
        manifest.wire_shape,
      )
    : null;
  const attack = attacker && (async (sent) => (await attacker(sent))[0]);
  const scope = [manifest.identity, manifest.files["client.onnx"], JSON.stringify(manifest.stages)];
  const draws = await openDraws(scope.join("/"));
  return { manifest, attack, encode: encoder, send: sender(stages, draws, wordsNeeded(size, stages)) };
}

// The bytes of a picture, by which it is known again.
export const keyOf = (picture) =>
  new Uint8Array(picture.buffer, picture.byteOffset, picture.byteLength).join();

// What leaves for a picture, from its clean z. One that was sent before gets the draw it was sent
// with.
function sender(stages, draws, count) {
  return async (picture, z) => {
    const { drawn, again } = await draws(new Uint8Array(picture.buffer.slice(0)), count);
    let at = 0;
    const draw = (n) => {
      const found = drawn.subarray(at, (at += n));
      if (found.length < n) throw new Error("The network gives too many numbers. Nothing is sent.");
      return found;
    };
    return { sent: applyStages(z, stages, draw), again };
  };
}
