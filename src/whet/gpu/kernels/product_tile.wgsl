// The 64 outputs of four panels for 32 rows. Both factors are read in blocks of 32 inputs, weights as numbers, into the
// workgroup's memory: lane i + 16 r computes outputs i, i + 16, i + 32 and i + 48 of rows 8 r ... 8 r + 7.
const X_PITCH = 33u;  // so that the lanes that write a row's inputs use different banks of the memory
var<workgroup> w_block: array<vec4f, 512>;          // [input / 4][output]
var<workgroup> x_block: array<vec4f, 8u * X_PITCH>;  // [input / 4][row]

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let i = lane % 16u;
  let n = params[N_PARAM];
  let panel = min(4u * group.x + lane / 16u, (COUNT - 1u) / 16u);
  let first = 32u * group.y;
  let row = 8u * (lane / 16u);
  var sum = array<vec4f, 8>();  // of the lane's rows: four outputs
  for (var step = 0u; step < (K + 31u) / 32u; step++) {
    let s = scales(panel, step, i);
    for (var w = 0u; w < 4u; w++) {
      let u = integers(panel, step, w, i);
      w_block[64u * w + lane] = s.x * u.low + s.z;
      w_block[64u * (w + 4u) + lane] = s.y * u.high + s.w;
    }
    let q = lane % 8u;
    for (var r = lane / 8u; r < 32u; r += 8u) {
      x_block[X_PITCH * q + r] = inputs(min(first + r, n - 1u), 32u * step + 4u * q);
    }
    workgroupBarrier();
    if (first + row < n) {
      for (var q = 0u; q < 8u; q++) {
        let at = 64u * q + i;
        let a = w_block[at];
        let b = w_block[at + 16u];
        let c = w_block[at + 32u];
        let d = w_block[at + 48u];
        for (var r = 0u; r < 8u; r++) {
          let x = x_block[X_PITCH * q + row + r];
          sum[r] += vec4f(dot(a, x), dot(b, x), dot(c, x), dot(d, x));
        }
      }
    }
    workgroupBarrier();
  }
  for (var r = 0u; r < 8u; r++) {
    for (var p = 0u; p < 4u; p++) { put(first + row + r, 64u * group.x + 16u * p + i, sum[r][p]); }
  }
}
