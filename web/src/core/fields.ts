/** Encoding of named fields as the numbers that cross to WebAssembly, in the order of bindings/fields.def. */
import { enums } from "../facts.js";

/** A number, a flag, 64 bits, the name of an enum's value, or a list. */
export type Field = number | boolean | bigint | string | readonly Field[];

/** Encode the fields of these names; a missing or an additional name is a type error. */
export function encode<K extends string>(names: readonly K[], values: Record<K, Field>): Float64Array {
  const numbers = (value: Field, name: string): number[] => {
    if (Array.isArray(value)) return [value.length, ...value.flatMap((each) => numbers(each, name))];
    if (typeof value === "bigint") return [Number(value >> 32n), Number(value & 0xffffffffn)];
    return [typeof value === "string" ? (enums[name as keyof typeof enums] as readonly string[]).indexOf(value) : Number(value)];
  };
  return Float64Array.from(names.flatMap((name) => numbers(values[name], name)));
}
