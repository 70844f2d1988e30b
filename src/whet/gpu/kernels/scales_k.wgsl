// (d s) u - (dmin m), with s and m of 6 bits for 32 inputs: 12 bytes of a group of 8 steps, then d and dmin.
const GROUP_WORDS = 64u;

fn scales(panel: u32, step: u32, j: u32) -> vec4f {
  let at = scales_at(panel, step / 8u);
  let i = step % 8u;
  var s = byte_at(at + 4u * i, j);
  var m = byte_at(at + 4u * (i + 4u), j);
  if (i < 4u) {
    s &= 63u;
    m &= 63u;
  } else {
    let above = (s >> 6u) << 4u;  // byte i has the bits above of m
    s = (m & 15u) | ((byte_at(at + 4u * (i - 4u), j) >> 6u) << 4u);
    m = (m >> 4u) | above;
  }
  let scale = half_at(at + 48u, j) * f32(s);
  let offset = -half_at(at + 56u, j) * f32(m);
  return vec4f(scale, scale, offset, offset);
}
