// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

export const num = (value) => (value === null || value === undefined ? "–" : whole.format(value));

export const plural = (count, one, many = `${one}s`) => `${num(count)} ${count === 1 ? one : many}`;

export function bytes(count) {
  if (count < 1024) return `${count} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = -1;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(value < 10 ? 1 : 0)} ${units[unit]}`;
}

const UNITS = [
  [86_400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
];

/** The two largest units: `2 min 5 s`, `10 min`, `3 d 4 h`. */
export function duration(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  const at = Math.max(0, UNITS.findIndex(([size]) => seconds >= size || size === 1));
  const [size, unit] = UNITS[at];
  const [smaller, name] = UNITS[at + 1] ?? [1, ""];
  const rest = Math.floor((seconds % size) / smaller);
  return `${Math.floor(seconds / size)} ${unit}${rest && name ? ` ${rest} ${name}` : ""}`;
}

export function ago(ms) {
  if (ms < 1500) return "just now";
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86_400)} d ago`;
}

export function time(ms, now = Date.now()) {
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) return "–";
  return Math.abs(now - ms) < 20 * 3_600_000 ? clock.format(at) : `${day.format(at)}, ${clock.format(at)}`;
}

export function iso(ms) {
  const at = new Date(ms);
  return Number.isNaN(at.getTime()) ? String(ms) : at.toISOString();
}

/** Partitions as `orders:0-3,7 payments:1`, from texts like `orders:0`. */
export function ranges(places) {
  const topics = new Map();
  for (const place of places) {
    const colon = place.lastIndexOf(":");
    const name = place.slice(0, colon);
    if (!topics.has(name)) topics.set(name, []);
    topics.get(name).push(Number(place.slice(colon + 1)));
  }
  return [...topics].map(([name, numbers]) => {
    numbers.sort((a, b) => a - b);
    const parts = [];
    for (let i = 0; i < numbers.length; i += 1) {
      let j = i;
      while (j + 1 < numbers.length && numbers[j + 1] === numbers[j] + 1) j += 1;
      parts.push(j > i ? `${numbers[i]}–${numbers[j]}` : `${numbers[i]}`);
      i = j;
    }
    return [name, parts.join(", "), numbers.length];
  });
}
