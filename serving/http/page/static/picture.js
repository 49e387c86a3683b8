// Images on canvases: shown whole, softened, and as the model gets them.

// A grey image in the model's size with edges as soft as in a scan: averaged over cells of two by two of the model's
// pixels, then interpolated between the centres of the cells.
export function soft(context, { width, height }) {
  const columns = Math.max(1, Math.round(width / 2));
  const rows = Math.max(1, Math.round(height / 2));
  const { data, width: across, height: down } = context.getImageData(0, 0, context.canvas.width, context.canvas.height);
  const sums = new Float64Array(columns * rows);
  const counts = new Float64Array(columns * rows);
  for (let y = 0; y < down; y++) {
    const row = Math.floor((y * rows) / down) * columns;
    for (let x = 0; x < across; x++) {
      const cell = row + Math.floor((x * columns) / across);
      sums[cell] += data[4 * (y * across + x)];
      counts[cell] += 1;
    }
  }
  const mean = (x, y) => {
    const cell = clamp(y, rows) * columns + clamp(x, columns);
    return sums[cell] / counts[cell];
  };
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const pixels = new ImageData(width, height);
  for (let y = 0; y < height; y++) {
    const [top, below] = split(((y + 0.5) * rows) / height - 0.5);
    for (let x = 0; x < width; x++) {
      const [left, right] = split(((x + 0.5) * columns) / width - 0.5);
      const upper = mean(left, top) * (1 - right) + mean(left + 1, top) * right;
      const lower = mean(left, top + 1) * (1 - right) + mean(left + 1, top + 1) * right;
      const at = 4 * (y * width + x);
      pixels.data.fill(Math.round(upper * (1 - below) + lower * below), at, at + 3);
      pixels.data[at + 3] = 255;
    }
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

const split = (number) => [Math.floor(number), number - Math.floor(number)];
const clamp = (number, count) => Math.min(Math.max(number, 0), count - 1);

// Draws the whole image as large as the pad allows. Small images are not smoothed, so that their pixels stay visible.
export function contain(context, image) {
  const { width, height } = context.canvas;
  const zoom = Math.min(width / image.width, height / image.height);
  const size = [image.width * zoom, image.height * zoom];
  context.imageSmoothingEnabled = zoom < 4;
  context.imageSmoothingQuality = "high";
  context.drawImage(image, (width - size[0]) / 2, (height - size[1]) / 2, ...size);
}

// Approximates the preprocessing of the service: cropped to the frame, resized, and grey for a grey model.
export function look(canvas, image, { height, width, mode }) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: mode === "L" });
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, width, height);
  const zoom = Math.max(width / image.width, height / image.height);
  const crop = [width / zoom, height / zoom];
  context.imageSmoothingQuality = "high";
  context.drawImage(image, (image.width - crop[0]) / 2, (image.height - crop[1]) / 2, ...crop, 0, 0, width, height);
  if (mode !== "L") return;
  const pixels = context.getImageData(0, 0, width, height);
  for (let at = 0; at < pixels.data.length; at += 4) {
    const [red, green, blue] = pixels.data.slice(at, at + 3);
    pixels.data.fill(0.299 * red + 0.587 * green + 0.114 * blue, at, at + 3);
  }
  context.putImageData(pixels, 0, 0);
}
