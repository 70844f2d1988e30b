/** Invalid argument, file or state; the message names the value, the expected one and the fix. */
export class WhetError extends Error {
  override name = "WhetError";
}

/** Missing file. */
export class MissingFileError extends WhetError {}

/** Not enough memory for the model or the request. */
export class OutOfMemoryError extends WhetError {
  override name = "OutOfMemoryError";
}

/** Format a value for an error message. */
export function show(value: unknown): string {
  if (typeof value === "number" || typeof value === "bigint" || value === undefined) return String(value);
  if (typeof value === "function" || typeof value === "symbol") return `a ${typeof value}`;
  try {
    return (JSON.stringify(value) ?? String(value)).slice(0, 80);
  } catch {
    return Object.prototype.toString.call(value);
  }
}
