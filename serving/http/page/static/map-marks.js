// The marks of the map. Six colours of Okabe and Ito and a violet stay apart under any deficiency of colour vision, as
// tests/training/show/test_map_colours.py simulates; beyond seven groups other shapes follow.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#9933ff"];
const SHAPES = ["disc", "square", "triangle", "diamond", "cross"];
const RADIUS = 4;
export const STAMP = 16; // pixels per side
export const LOOSE = { colour: "", shape: "ring" }; // of an image in no group
export const SELECTED = "selected"; // the shape around a selected image

const stamps = new Map();

// The colour and shape of the group in this place of all groups.
export const style = (at) => ({
  colour: COLOURS[at % COLOURS.length],
  shape: SHAPES[Math.floor(at / COLOURS.length) % SHAPES.length],
});

// A mark is drawn once, and then copied: with 20,000 of them that is several times as fast.
export function stamp(shape, colour) {
  const ratio = window.devicePixelRatio || 1;
  const key = `${shape} ${colour} ${ratio}`;
  if (!stamps.has(key)) {
    const made = document.createElement("canvas");
    made.width = made.height = Math.ceil(STAMP * ratio);
    const paint = made.getContext("2d");
    paint.scale(ratio, ratio);
    mark(paint, shape, STAMP / 2, STAMP / 2, colour);
    stamps.set(key, made);
  }
  return stamps.get(key);
}

export function mark(paint, shape, x, y, colour) {
  paint.fillStyle = paint.strokeStyle = colour;
  paint.lineWidth = shape === SELECTED ? 2 : 1.5;
  const r = RADIUS;
  if (shape === "square") return paint.fillRect(x - r + 0.5, y - r + 0.5, 2 * r - 1, 2 * r - 1);
  paint.beginPath();
  if (shape === "disc" || shape === "ring") paint.arc(x, y, r - 0.5, 0, 7);
  else if (shape === SELECTED) paint.arc(x, y, r + 2.5, 0, 7);
  else if (shape === "triangle") outline(paint, [x, y - r], [x + r, y + r - 1], [x - r, y + r - 1]);
  else if (shape === "diamond") outline(paint, [x, y - r - 1], [x + r, y], [x, y + r + 1], [x - r, y]);
  else {
    paint.moveTo(x - r, y - r);
    paint.lineTo(x + r, y + r);
    paint.moveTo(x + r, y - r);
    paint.lineTo(x - r, y + r);
  }
  if (shape === "ring" || shape === "cross" || shape === SELECTED) paint.stroke();
  else paint.fill();
}

export function outline(paint, ...corners) {
  paint.moveTo(...corners[0]);
  for (const corner of corners.slice(1)) paint.lineTo(...corner);
  paint.closePath();
}
