// What all pages share: making elements, and counts, shares and times as text. Values from the service are only
// inserted as text, never as HTML.

export const element = (id) => document.getElementById(id);

const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const PERCENT = "\u00a0%"; // no line break before the sign

export function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name === "on") for (const [event, react] of Object.entries(value)) made.addEventListener(event, react);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export const counted = (count, one, many = `${one}s`) => `${count.toLocaleString()} ${count === 1 ? one : many}`;

export const images = (count) => counted(count, "image");

export const quoted = (label) => `“${label}”`;

export const when = (text) => DAY.format(new Date(text));

export function percent(share) {
  const value = share * 100;
  if (value > 0 && value < 0.1) return `less than 0.1${PERCENT}`;
  if (value < 100 && value > 99.9) return `more than 99.9${PERCENT}`;
  return `${Number(value.toFixed(value < 10 || value > 99 ? 1 : 0))}${PERCENT}`;
}

// Beside a bar there is no room for words.
export const shortPercent = (share) => percent(share).replace("less than", "<").replace("more than", ">");

// "a", "a and b", "a, b and c"; of more than `most` words, the rest as a number.
export function listed(words, most = 6) {
  const shown = words.length > most ? [...words.slice(0, most - 1), `${words.length - most + 1} more`] : words;
  return shown.length < 2 ? shown.join("") : `${shown.slice(0, -1).join(", ")} and ${shown.at(-1)}`;
}
