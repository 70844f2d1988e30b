// The folders of src/ and their allowed imports, including imports of types; no circles of files.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import ts from "typescript";

const ROOMS = {
  core: [], // the WebAssembly module, workers and errors
  files: ["core"], // bytes and tensors of files
  models: ["core", "files"], // configs, slots and formats
  text: ["core"], // tokenizers and chat templates
  settings: ["core", "text"], // settings and results of requests, for engine and learner
  learner: ["core", "files", "models", "text", "settings"], // adapters in training
  gpu: ["core", "models"], // the plan of a model on a GPU
  engine: ["core", "files", "models", "text", "settings", "learner", "gpu"],
  ".": ["core", "files", "engine", "learner", "settings", "text"], // the entries index.ts and ops.ts
};
const roomOf = (path) => (path.includes("/") ? path.split("/")[0] : ".");
const files = readdirSync("src", { recursive: true }).filter((path) => path.endsWith(".ts"));
const importsOf = (path) => ts.preProcessFile(readFileSync(join("src", path), "utf8")).importedFiles.map(({ fileName }) => fileName);
const imports = new Map(files.map((path) => [path, importsOf(path).filter((name) => name.startsWith(".")).map((name) => join(path, "..", name.replace(/\.js$/, ".ts")))]));

test("each folder imports only its allowed folders and the generated facts.ts", () => {
  for (const [path, targets] of imports) {
    for (const target of targets) {
      const [from, to] = [roomOf(path), roomOf(target)];
      assert.ok(from === to || target === "facts.ts" || ROOMS[from]?.includes(to), `${path} imports ${target}`);
    }
  }
});

test("no import circles", () => {
  const finished = new Set();
  const visit = (path, trail) => {
    assert.ok(!trail.includes(path), `circle: ${[...trail, path].join(" -> ")}`);
    if (finished.has(path)) return;
    for (const target of imports.get(path)) visit(target, [...trail, path]);
    finished.add(path);
  };
  for (const path of files) visit(path, []);
});
