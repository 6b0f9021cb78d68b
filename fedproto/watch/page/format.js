// Numbers, names and colours as text.

const MISSING = "–";

export function percent(value, digits = 1) {
  return value == null ? MISSING : `${(100 * value).toFixed(digits)}%`;
}

// A difference of fractions in percentage points, with its sign; never "-0.0".
export function points(value) {
  if (value == null) return MISSING;
  const text = (100 * value).toFixed(1);
  if (Number(text) === 0) return "0.0";
  return value > 0 ? `+${text}` : `−${text.slice(1)}`;
}

export function bytes(count) {
  if (count == null) return MISSING;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return `${unit === "B" ? count : count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

export function duration(seconds) {
  if (seconds == null) return MISSING;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(seconds, now = Date.now() / 1000) {
  if (!seconds) return "never";
  const age = Math.max(0, now - seconds);
  return age < 2 ? "now" : `${duration(age)} ago`;
}

export function count(number, noun, plural = `${noun}s`) {
  if (number == null) return MISSING;
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}

export function plain(value) {
  if (value == null) return MISSING;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

const WAYS = {
  head: "classifier head",
  prototype: "nearest prototype",
  both: "head and prototype together",
  teacher: "teacher",
  "head+teacher": "head and teacher",
  "both+teacher": "head, prototype and teacher",
};

export function wayName(way) {
  const own = way.endsWith("_own");
  const base = own ? way.slice(0, -4) : way;
  return (WAYS[base] ?? base) + (own ? ", own classes only" : "");
}

// The ways to predict of a run; those among own classes only if they ever differ from the others.
export function distinctWays(run) {
  const found = Object.keys(run.accuracy);
  return found.filter((way) => {
    if (!way.endsWith("_own")) return true;
    const base = way.slice(0, -4);
    if (!found.includes(base)) return true;
    const own = run.series.columns[`accuracy/${way}/mean`] ?? [];
    const all = run.series.columns[`accuracy/${base}/mean`] ?? [];
    const differ = own.some((value, index) => value !== all[index]);
    return differ || run.accuracy[way].mean !== run.accuracy[base].mean;
  }).sort((a, b) => (b === run.main) - (a === run.main));
}

export const STATES = {
  running: "running",
  finished: "finished",
  stopped: "stopped before its last round",
  diverged: "diverged",
  damaged: "cannot be read",
};

// ---- looks: one colour per method, shades and dashes for the rest

export const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2, 1, 2]];
const INK = "#1b1f24";

function mix(colour, other, share) {
  const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const a = parse(colour);
  const b = parse(other);
  const parts = a.map((value, index) => Math.round(value * (1 - share) + b[index] * share));
  return `#${parts.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

export function isDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// The colour and dash of the nth line of a method.
export function lookOf(look, nth = 0) {
  let colour = /^#[0-9a-f]{6}$/.test(look.colour) ? look.colour : INK;
  const dark = isDark();
  if (colour === INK && dark) colour = "#e6e8eb";
  if (dark) colour = mix(colour, "#ffffff", 0.18);
  const shade = [0, 0.35, 0.2, 0.5][nth % 4];
  return {
    colour: mix(colour, dark ? "#ffffff" : "#000000", shade),
    dash: DASHES[(look.dash + nth) % DASHES.length],
  };
}

export function classColour(index) {
  const hue = (index * 137.508) % 360;
  return `hsl(${hue.toFixed(0)} 62% ${isDark() ? 68 : 38}%)`;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
