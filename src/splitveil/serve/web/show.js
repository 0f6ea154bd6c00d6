// Numbers as pictures.

// Pixels (c, h, w) in [0, 1], one canvas pixel each; the style sheet enlarges them.
export function paint(canvas, values, [channels, height, width]) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const size = width * height;
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) {
      image.data[4 * i + c] = Math.round(255 * values[(channels === 3 ? c : 0) * size + i]);
    }
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

// Dark violet to light yellow, even in lightness.
const RAMP = [
  [13, 8, 65],
  [93, 18, 110],
  [165, 44, 96],
  [222, 85, 60],
  [246, 154, 44],
  [250, 238, 170],
];

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((v, c) => Math.round(v + (at - low) * (RAMP[low + 1][c] - v)));
}

// How the numbers of one image are laid out: a tile per channel, in as square a grid as fits.
export function layout(shape) {
  const whole = shape.length === 3;
  const size = shape.reduce((a, b) => a * b, 1);
  const [tiles, height, width] = whole ? shape : [1, 1, size];
  if (!whole) {
    const side = Math.ceil(Math.sqrt(size));
    return { tiles: 1, columns: 1, rows: 1, height: Math.ceil(size / side), width: side, gap: 0 };
  }
  const columns = Math.ceil(Math.sqrt((tiles * height) / width));
  return { tiles, columns, rows: Math.ceil(tiles / columns), height, width, gap: 1 };
}

export function heatMap(canvas, values, shape) {
  const { tiles, columns, rows, height, width, gap } = layout(shape);
  canvas.width = columns * (width + gap) - gap;
  canvas.height = rows * (height + gap) - gap;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  for (let i = 0; i < values.length; i++) {
    const tile = Math.floor(i / (height * width)) % tiles;
    const inside = i % (height * width);
    const x = (tile % columns) * (width + gap) + (inside % width);
    const y = Math.floor(tile / columns) * (height + gap) + Math.floor(inside / width);
    const shade = colour((values[i] - low) / (high - low || 1));
    image.data.set([...shade, 255], 4 * (y * canvas.width + x));
  }
  context.putImageData(image, 0, 0);
  return { low, high };
}

export function ramp(canvas) {
  canvas.width = 64;
  canvas.height = 1;
  const context = canvas.getContext("2d");
  const image = context.createImageData(64, 1);
  for (let i = 0; i < 64; i++) image.data.set([...colour(i / 63), 255], 4 * i);
  context.putImageData(image, 0, 0);
}

export function softmax(logits) {
  const top = Math.max(...logits);
  const powers = logits.map((v) => Math.exp(v - top));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((v) => v / total);
}

// The likeliest classes, one line each.
export function bars(list, shares, nameOf, most = 5) {
  const order = Array.from(shares.keys()).sort((a, b) => shares[b] - shares[a]);
  list.replaceChildren(
    ...order.slice(0, most).map((k) => {
      const line = document.createElement("li");
      const name = document.createElement("span");
      const meter = document.createElement("meter");
      const value = document.createElement("span");
      name.textContent = nameOf(k);
      meter.value = shares[k];
      meter.setAttribute("aria-label", nameOf(k));
      value.textContent = `${(100 * shares[k]).toFixed(1)} %`;
      line.append(name, meter, value);
      return line;
    }),
  );
  return order[0];
}
