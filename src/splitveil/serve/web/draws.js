// Which draw of noise a picture was sent with: the same picture is sent with the same draw, also in
// another tab and after a restart. Whoever sees many draws of one picture can average the noise away.
//
// As in splitveil/serve/draws.py, what is kept is a keyed hash and a seed, never the picture or what
// was sent of it; the random words also depend on the picture. Scripts cannot read the key.

import { words } from "./noise.js";

const KEPT = 1000; // pictures; those used longest ago are dropped
const SECRET = 32; // bytes of a seed

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// A transaction on one table, once it is on disk.
async function changed(database, table, work) {
  const all = database.transaction(table, "readwrite", { durability: "strict" });
  const kept = new Promise((resolve, reject) => {
    all.oncomplete = resolve;
    all.onabort = () => reject(all.error);
  });
  const [found] = await Promise.all([work(all.objectStore(table)), kept]);
  return found;
}

function openDatabase() {
  const request = indexedDB.open("splitveil-draws", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("key");
    request.result.createObjectStore("draws", { keyPath: "digest" }).createIndex("used", "used");
  };
  return done(request);
}

async function keyOf(database) {
  const fresh = await crypto.subtle.generateKey({ name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  return changed(database, "key", async (table) => {
    const found = await done(table.get(0));
    if (!found) table.put(fresh, 0);
    return found ?? fresh;
  });
}

// The seed of a picture, drawn if there is none, and whether it was there.
function seedOf(database, digest) {
  return changed(database, "draws", async (table) => {
    const known = await done(table.get(digest));
    const seed = known?.seed ?? crypto.getRandomValues(new Uint8Array(SECRET));
    table.put({ digest, seed, used: Date.now() });
    const over = (await done(table.count())) - KEPT;
    const oldest = over > 0 ? await done(table.index("used").getAllKeys(null, over)) : [];
    oldest.forEach((each) => table.delete(each));
    return { seed, again: known !== undefined };
  });
}

// Random words from a secret: the stream of a cipher with it as the key.
async function wordsFrom(secret, count) {
  const key = await crypto.subtle.importKey("raw", secret, "AES-CTR", false, ["encrypt"]);
  const way = { name: "AES-CTR", counter: new Uint8Array(16), length: 64 };
  return new Uint32Array(await crypto.subtle.encrypt(way, key, new Uint8Array(4 * count)));
}

async function onDisk(scope) {
  const database = await openDatabase();
  const key = await keyOf(database);
  const hmac = (...parts) => new Blob(parts).arrayBuffer().then((b) => crypto.subtle.sign("HMAC", key, b));
  return async (picture, count) => {
    const digest = await hmac("image\0", scope, "\0", picture);
    const { seed, again } = await seedOf(database, digest);
    const secret = await hmac("draw\0", scope, "\0", picture, seed);
    return { drawn: await wordsFrom(secret, count), again };
  };
}

function inMemory() {
  const kept = new Map();
  return async (picture, count) => {
    const name = picture.join();
    const again = kept.has(name);
    if (!again) kept.set(name, words(count));
    if (kept.size > KEPT) kept.delete(kept.keys().next().value);
    return { drawn: kept.get(name), again };
  };
}

// A function that gives the random words for a picture (bytes), and whether it was sent before.
// `scope` tells the encoder: the difference of two z with one draw would have no noise. Browsers
// hash on https and localhost only, and some forbid to keep anything; then the page remembers.
export async function openDraws(scope) {
  try {
    return await onDisk(scope);
  } catch {
    return inMemory();
  }
}
