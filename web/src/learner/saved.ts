/** Adapters in the origin's private file system: a PEFT folder per name, next to the cache of downloads. */
import { show, WhetError } from "../core/errors.js";

const FOLDER = "whet-web-adapters";

/** Return the folder of all adapters. */
async function openFolder(where: string): Promise<FileSystemDirectoryHandle> {
  try {
    return await (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER, { create: true });
  } catch {
    throw new WhetError(`${where}: this runtime has no private file system: it is not a browser, or the page has no secure origin. Write the files of toPeft() instead.`);
  }
}

export function checkName(name: unknown, where: string): string {
  if (typeof name !== "string" || !/^[\w-][\w.-]*$/.test(name)) throw new WhetError(`${where}: name is ${show(name)}, expected letters, digits, "_", "-" and ".".`);
  return name;
}

const unknownAdapter = (name: string, where: string) => () => {
  throw new WhetError(`${where}: no adapter is saved as ${show(name)}. Pass a name of listAdapters().`);
};

/** Write the files of an adapter; an adapter of that name is replaced. */
export async function writeSaved(name: string, files: Record<string, Uint8Array<ArrayBuffer>>, where: string): Promise<void> {
  const folder = await (await openFolder(where)).getDirectoryHandle(checkName(name, where), { create: true });
  for (const [file, bytes] of Object.entries(files)) {
    const writable = await (await folder.getFileHandle(file, { create: true })).createWritable();
    await writable.write(bytes);
    await writable.close();
  }
}

/** Names of the saved adapters. */
export async function listAdapters(): Promise<string[]> {
  const names: string[] = [];
  for await (const name of ((await openFolder("listAdapters")) as FileSystemDirectoryHandle & { keys(): AsyncIterable<string> }).keys()) names.push(name);
  return names.sort();
}

/** Open an adapter that Learner.save has written, as a source for Engine.loadAdapter. */
export async function openAdapter(name: string): Promise<{ files: Record<string, File> }> {
  const where = "openAdapter";
  const folder = await (await openFolder(where)).getDirectoryHandle(checkName(name, where)).catch(unknownAdapter(name, where));
  const files: Record<string, File> = {};
  for (const file of ["adapter_config.json", "adapter_model.safetensors", "whet_base.json"]) files[file] = await (await folder.getFileHandle(file)).getFile();
  return { files };
}

/** Remove a saved adapter. */
export async function deleteAdapter(name: string): Promise<void> {
  const where = "deleteAdapter";
  await (await openFolder(where)).removeEntry(checkName(name, where), { recursive: true }).catch(unknownAdapter(name, where));
}
