// Checks of errors by their facts (argument, value, expected value, fix), so that tests do not depend on wording.
import assert from "node:assert/strict";

/** Return a check for assert.throws and assert.rejects: the error's text contains every fact, numbers as whole numbers. */
export const mentions = (...facts) => (error) => {
  const text = String(error);
  for (const fact of facts) {
    const isFound = typeof fact === "number" ? new RegExp(`(?<![\\w.])${fact}(?!\\w|\\.\\d)`).test(text) : text.includes(fact);
    assert.ok(isFound, `${JSON.stringify(fact)} is missing in: ${text}`);
  }
  return true;
};
