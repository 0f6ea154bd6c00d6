// The KServe v2 protocol with binary tensors: a JSON header, then little-endian numbers.

import { roundHalfEven } from "./stages.js";

const HEADER_LENGTH = "Inference-Header-Content-Length";

// How the numbers of a datatype are written; integers count steps of the grid, within their limits.
const WRITERS = {
  FP32: { bytes: 4, write: (view, at, v) => view.setFloat32(at, v, true) },
  INT16: { bytes: 2, write: (view, at, v, step) => view.setInt16(at, steps(v, step, 15), true) },
  INT32: { bytes: 4, write: (view, at, v, step) => view.setInt32(at, steps(v, step, 31), true) },
};

function steps(value, step, bits) {
  const found = roundHalfEven(value / step);
  if (Math.fround(found * step) !== value) throw new Error("What is sent must lie on the noise's grid.");
  return Math.min(Math.max(found, -(2 ** bits)), 2 ** bits - 1);
}

function littleEndian(values, datatype, step) {
  const { bytes, write } = WRITERS[datatype];
  const view = new DataView(new ArrayBuffer(bytes * values.length));
  values.forEach((v, i) => write(view, bytes * i, v, step));
  return new Uint8Array(view.buffer);
}

// The body of an infer call for one image's smashed data: exactly the tensor and its description.
export function encodeRequest(z, { wire_shape: shape, datatype, grid }) {
  const raw = littleEndian(z, datatype, grid);
  const header = JSON.stringify({
    outputs: [{ name: "logits", parameters: { binary_data: true } }],
    inputs: [
      { name: "z", shape: [1, ...shape], datatype, parameters: { binary_data_size: raw.length } },
    ],
  });
  const head = new TextEncoder().encode(header);
  const body = new Uint8Array(head.length + raw.length);
  body.set(head);
  body.set(raw, head.length);
  return { body, header, headerBytes: head.length, numberBytes: raw.length };
}

export function decodeAnswer(content, headerLength, classes) {
  const size = headerLength === null ? content.byteLength : Number(headerLength);
  const head = JSON.parse(new TextDecoder().decode(content.slice(0, size)));
  const tensor = head.outputs?.[0];
  const view = new DataView(content, size);
  if (tensor?.name !== "logits" || view.byteLength !== 4 * classes) {
    throw new Error("The server's answer cannot be read.");
  }
  return Array.from({ length: classes }, (_, i) => view.getFloat32(4 * i, true));
}

// Why a request was refused, in the server's words.
export async function refusal(reply) {
  const told = await reply.json().catch(() => ({}));
  return `The server refused with ${reply.status}: ${told.error ?? "no reason given"}.`;
}

export async function infer(name, request, classes, headers) {
  const reply = await fetch(new URL(`../v2/models/${name}/infer`, import.meta.url), {
    method: "POST",
    headers: {
      ...headers,
      "Content-Type": "application/octet-stream",
      [HEADER_LENGTH]: String(request.headerBytes),
    },
    body: request.body,
    credentials: "omit",
    cache: "no-store",
  });
  if (!reply.ok) throw new Error(await refusal(reply));
  return decodeAnswer(await reply.arrayBuffer(), reply.headers.get(HEADER_LENGTH), classes);
}
