// The sum over the lanes of a workgroup; all of them call it.
var<workgroup> partial: array<f32, 64>;

fn total(lane: u32, value: f32) -> f32 {
  partial[lane] = value;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half /= 2u) {
    if (lane < half) { partial[lane] += partial[lane + half]; }
    workgroupBarrier();
  }
  let sum = partial[0];
  workgroupBarrier();
  return sum;
}
