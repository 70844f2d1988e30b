// Eight words of a step of an output, four inputs each. Bytes have a bias of 128 where the CPU's products want it.
const HAS_OFFSETS = false;
const SIGNS = BYTE_BIAS * 0x01010101u;
struct Eight { low: vec4f, high: vec4f }

fn integers(panel: u32, step: u32, w: u32, j: u32) -> Eight {
  let at = panel * PANEL_WORDS + 128u * step + 16u * w + j;
  return Eight(vec4f(unpack4xI8(weights[at] ^ SIGNS)), vec4f(unpack4xI8(weights[at + 64u] ^ SIGNS)));
}
