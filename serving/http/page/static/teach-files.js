// Image files that a person drops, pastes or chooses, each with the folder that it was in.

const IMAGE = /\.(png|jpe?g|jfif|webp|bmp)$/i;
const HIDDEN = /^(\.|thumbs\.db$|desktop\.ini$)/i; // files that a system adds to folders

// Found in a drop: [{ file, folder }], with the innermost folder's name, or null outside of folders.
export async function dropped(transfer) {
  // The entries can only be read before the first pause.
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return chosen([...transfer.files]);
  return (await Promise.all(entries.map((entry) => walk(entry, null)))).flat();
}

async function walk(entry, folder) {
  if (HIDDEN.test(entry.name)) return [];
  if (entry.isFile) return [{ file: await new Promise((resolve, reject) => entry.file(resolve, reject)), folder }];
  const reader = entry.createReader();
  const inside = [];
  for (;;) {
    // A call returns some of the entries; none are left if it returns none.
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    inside.push(...some);
  }
  return (await Promise.all(inside.map((child) => walk(child, entry.name)))).flat();
}

// Of a file chooser or the clipboard; a chosen folder's files have their path.
export function chosen(files) {
  return files
    .filter((file) => !HIDDEN.test(file.name))
    .map((file) => ({ file, folder: file.webkitRelativePath?.split("/").at(-2) ?? null }));
}

export const isImage = ({ file }) => file.type.startsWith("image/") || IMAGE.test(file.name);

// The class of a folder. An export writes what a path cannot contain as URLs do: "a%2Fb" for "a/b".
const ESCAPED = /%(2F|5C|3A|2A|3F|22|3C|3E|7C|25|2E|20|5F)/gi;
const labelOf = (folder) => folder.replace(ESCAPED, (_, code) => String.fromCharCode(parseInt(code, 16)));

// Classes with their files: by folder if there are several folders, else all of the typed class or of the one folder.
// `unnamed` files have neither.
export function byClass(found, typed) {
  const folders = new Set(found.map(({ folder }) => folder).filter((folder) => folder !== null));
  const classes = new Map();
  const unnamed = [];
  for (const { file, folder } of found) {
    const named = folder === null ? null : labelOf(folder);
    const label = folders.size > 1 ? (named ?? typed) : typed || named;
    if (!label) unnamed.push(file);
    else classes.set(label, [...(classes.get(label) ?? []), file]);
  }
  const sorted = new Map([...classes].sort(([one], [other]) => one.localeCompare(other)));
  return { classes: sorted, unnamed, folders: folders.size };
}
