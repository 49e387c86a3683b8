// Shrinks large photos before they are sent. The service reduces them to the model's size anyway.

const LARGE_PIXELS = 1_000_000; // as in the service, which takes smaller images as they are
const SPARE = 4; // times the model's pixels per side are sent, so that the service still has pixels to average
const LEAST_SIDE = 512;
const QUALITY = 0.92;

// What to send for a file: the file itself, or a smaller JPEG image of it. The bitmap is upright already, because
// browsers apply the orientation of a photo when they decode it, and the new file has none.
export async function shrunk(file, bitmap, { width, height }) {
  const side = Math.max(SPARE * Math.max(width, height), LEAST_SIDE);
  const zoom = side / Math.min(bitmap.width, bitmap.height);
  if (zoom >= 1 || bitmap.width * bitmap.height <= LARGE_PIXELS) return { content: file };
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(bitmap.width * zoom);
  canvas.height = Math.round(bitmap.height * zoom);
  const context = canvas.getContext("2d");
  // The service shows white behind transparent pixels, and a JPEG image has none.
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const content = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
  if (!content || content.size >= file.size) return { content: file };
  const sizes = `${canvas.width} × ${canvas.height} pixels, ${bytes(content.size)}`;
  return { content, note: `Sent as ${sizes} (the file: ${bitmap.width} × ${bitmap.height}, ${bytes(file.size)})` };
}

export function bytes(count) {
  return count < 1e6 ? `${Math.max(1, Math.round(count / 1e3))} kB` : `${(count / 1e6).toFixed(1)} MB`;
}
