// Examples as they are sent: large photos are shrunk in the same way as on the main page.

import { getJson } from "./api.js";
import { shrunk } from "./upload.js";

const QUALITY = 0.92;

let model = null;

// The file itself, or a smaller JPEG of it. A file that the browser cannot read is left for the service to judge.
export async function shrink(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return file;
  }
  model ??= getJson("model");
  const { content } = await shrunk(file, bitmap, (await model).image);
  bitmap.close();
  return content;
}

// A JPEG of a video frame with this short side, or of its own size if that is smaller.
export function frame(video, side) {
  const { videoWidth: width, videoHeight: height } = video;
  const zoom = Math.min(1, side / Math.min(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * zoom));
  canvas.height = Math.max(1, Math.round(height * zoom));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
}
