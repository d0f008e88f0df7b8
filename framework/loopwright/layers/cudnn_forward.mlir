module @attention {
  func.func public @main(%query: $query, %key: $key, %value: $key$bias_argument) -> ($query, $sums) {
    %0:3 = stablehlo.custom_call @__cudnn$$fmha${kind}Softmax(%query, %key, %value$bias) {
      api_version = 2 : i32,
      backend_config = "$config",
      operand_layouts = [$rowwise, $rowwise, $rowwise$bias_layout],
      result_layouts = [$turned, dense<[2, 1, 0]> : tensor<3xindex>, dense<0> : tensor<1xindex>]
    } : ($query, $key, $key$bias_type) -> ($query_turned, $sums, tensor<0xui8>)
    %1 = stablehlo.transpose %0#0, dims = [0, 2, 1, 3] : ($query_turned) -> $query
    return %1, %0#1 : $query, $sums
  }
}
