// Bundles the package into dist/: entries for the page, the engine's worker, its threads, its chunks of Hugging Face formats,
// of the learner and of the GPU, and the primitives and kernels. Libraries are included, so that a page needs no bundler.
import { execFileSync } from "node:child_process";
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

export const libraries = ["@huggingface/jinja", "@huggingface/tokenizers", "@noble/hashes"];
export const options = {
  entryPoints: { index: "src/index.ts", worker: "src/engine/worker.ts", thread: "src/core/thread.ts", hf: "src/models/hf.ts", learner: "src/learner/host.ts", gpu: "src/gpu/program.ts", ops: "src/ops.ts" },
  absWorkingDir: fileURLToPath(new URL(".", import.meta.url)),
  outdir: "dist",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  logLevel: "warning",
};

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  execFileSync("node_modules/.bin/tsc", ["--emitDeclarationOnly"], { stdio: "inherit" });
  const licenses = await Promise.all(
    libraries.map(async (name) => {
      const { version } = JSON.parse(await readFile(`node_modules/${name}/package.json`, "utf8"));
      return `${name} ${version}\n\n${await readFile(`node_modules/${name}/LICENSE`, "utf8")}`;
    }),
  );
  // Debian packages that wasm-ld links.
  for (const name of ["libc++-19-dev-wasm32", "libclang-rt-19-dev-wasm32", "wasi-libc"]) licenses.push(`${name}\n\n${await readFile(`/usr/share/doc/${name}/copyright`, "utf8")}`);
  await writeFile("dist/third_party_licenses.txt", licenses.join("\n\n"));
  await build(options);
  // Comments that make bundlers leave these imports to the browser: the minifier drops them.
  const text = await readFile("dist/worker.js", "utf8");
  const imports = "import(/* @vite-ignore */ /* webpackIgnore: true */ /* turbopackIgnore: true */ new URL(";
  if (text.split("import(new URL(").length !== 4) throw new Error("dist/worker.js does not have exactly three imports of URLs");
  await writeFile("dist/worker.js", text.replaceAll("import(new URL(", imports));
}
