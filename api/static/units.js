/** Quantities as a reader wants them. */

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (Number.isFinite(value) ? GROUPED.format(value) : "–");

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Milliseconds with a unit; a dash for null, before the end of the interval. */
export function duration(ms) {
  if (!Number.isFinite(ms) || ms < 0) return "–";
  if (ms < 10 && !Number.isInteger(ms)) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const totalS = Math.round(ms / 1000);
  const minutes = Math.floor(totalS / 60);
  if (minutes < 60) return `${minutes} min ${totalS % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** An age in its largest unit, e.g. "2 min ago". */
export function ago(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return s < 86_400 ? `${Math.floor(s / 3600)} h ago` : `${Math.floor(s / 86_400)} d ago`;
}

/** Bytes in binary units, as Redis counts its memory. */
export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(value, 1)) / 10), units.length - 1);
  const amount = value / 1024 ** power;
  return `${amount < 10 && power > 0 ? amount.toFixed(1) : Math.round(amount)} ${units[power]}`;
}

export const rate = (perSecond) =>
  Number.isFinite(perSecond) ? perSecond.toFixed(perSecond < 100 ? 1 : 0) : "–";
