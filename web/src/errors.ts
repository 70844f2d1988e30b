/** An argument, a file or a state that the engine refuses: what came, what was expected, and the fix. */
export class WhetError extends Error {
  override name = "WhetError";
}

/** A file that is not there. */
export class MissingFileError extends WhetError {}

/** The memory that the model or the request needs is not there. */
export class OutOfMemoryError extends WhetError {
  override name = "OutOfMemoryError";
}
