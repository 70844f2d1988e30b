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
