// The picture that goes in: pixels of exactly the network's size, drawn or taken from a file.

import { paint } from "./show.js";

const CORE = 0.35; // of the brush, in pixels: full brightness
const EDGE = 0.85; // further out it fades to nothing
const GREY = [19595, 38470, 7471]; // of 65536: the weights that `splitveil infer` uses

export class Picture {
  // values: Float32Array (c, h, w) in [0, 1]
  constructor(canvas, [channels, height, width], changed) {
    Object.assign(this, { canvas, channels, height, width, changed });
    this.values = new Float32Array(channels * height * width);
    this.cursor = null;
    this.drawable = channels === 1 && Math.max(height, width) <= 32;
    if (this.drawable) this.listen();
    this.show();
  }

  listen() {
    let last = null;
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [
        ((event.clientX - box.left) / box.width) * this.width,
        ((event.clientY - box.top) / box.height) * this.height,
      ];
    };
    const move = (event) => {
      if (!last) return;
      const [x, y] = place(event);
      const steps = Math.ceil(4 * Math.hypot(x - last[0], y - last[1])) + 1;
      for (let i = 1; i <= steps; i++) {
        this.stroke(last[0] + ((x - last[0]) * i) / steps, last[1] + ((y - last[1]) * i) / steps);
      }
      last = [x, y];
      this.update();
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.cursor = null;
      last = place(event);
      this.canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    this.canvas.addEventListener("pointermove", move);
    for (const end of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(end, () => (last = null));
    }
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => {
      this.cursor = null;
      this.show();
    });
  }

  // Arrow keys move a cursor, the space bar paints its pixel or wipes it.
  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const [x, y] = this.cursor ?? [this.width >> 1, this.height >> 1];
    if (event.key in moves) {
      const [dx, dy] = this.cursor ? moves[event.key] : [0, 0];
      this.cursor = [
        Math.min(Math.max(x + dx, 0), this.width - 1),
        Math.min(Math.max(y + dy, 0), this.height - 1),
      ];
      this.show();
    } else if (event.key === " ") {
      this.cursor = [x, y];
      const at = y * this.width + x;
      this.values[at] = this.values[at] < 0.5 ? 1 : 0;
      this.update();
    } else {
      return;
    }
    event.preventDefault();
  }

  stroke(x, y) {
    for (let row = 0; row < this.height; row++) {
      for (let col = 0; col < this.width; col++) {
        const distance = Math.hypot(col + 0.5 - x, row + 0.5 - y);
        const ink = Math.min(Math.max(1 - (distance - CORE) / EDGE, 0), 1);
        const at = row * this.width + col;
        this.values[at] = Math.max(this.values[at], ink);
      }
    }
  }

  clear() {
    this.values.fill(0);
    this.update();
  }

  invert() {
    this.values = this.values.map((v) => 1 - v);
    this.update();
  }

  // Takes an image file: its middle, in the shape of the network's pictures, scaled to their size.
  async take(file) {
    const image = await createImageBitmap(file, { colorSpaceConversion: "none" });
    const { width, height } = image;
    const scale = Math.min(width / this.width, height / this.height);
    const [w, h] = [scale * this.width, scale * this.height];
    const canvas = new OffscreenCanvas(this.width, this.height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.imageSmoothingEnabled = scale !== 1;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, (width - w) / 2, (height - h) / 2, w, h, 0, 0, this.width, this.height);
    image.close();
    const { data } = context.getImageData(0, 0, this.width, this.height);
    const size = this.width * this.height;
    this.values = new Float32Array(this.channels * size);
    for (let i = 0; i < size; i++) {
      const rgb = [data[4 * i], data[4 * i + 1], data[4 * i + 2]];
      const grey = GREY.reduce((sum, g, c) => sum + g * rgb[c], 32768) >> 16;
      for (let c = 0; c < this.channels; c++) {
        this.values[c * size + i] = (this.channels === 1 ? grey : rgb[c]) / 255;
      }
    }
    this.update();
    return { width, height, cropped: width * this.height !== height * this.width };
  }

  update() {
    this.show();
    this.changed();
  }

  show() {
    paint(this.canvas, this.values, [this.channels, this.height, this.width]);
    if (this.cursor) {
      const context = this.canvas.getContext("2d");
      context.fillStyle = "rgb(230 120 20 / 60%)";
      context.fillRect(this.cursor[0], this.cursor[1], 1, 1);
    }
  }
}
