// Files that fixtures.py has written.
import { readFile } from "node:fs/promises";

export const FIXTURES = new URL("../build/web/fixtures/", `file://${process.cwd()}/`); // make runs the tests in web/

export async function readFixture(name) {
  return JSON.parse(await readFile(new URL(`${name}.json`, FIXTURES), "utf8"));
}
