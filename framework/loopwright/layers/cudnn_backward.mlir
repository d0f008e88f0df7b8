module @attention {
  func.func public @main(%query: $query, %key: $key, %value: $key, %sums: $sums, %upstream: $query$bias_argument, %out: $query) -> ($query, $key, $key) {
    %0:$results = stablehlo.custom_call @__cudnn$$fmha${kind}SoftmaxBackward(%query, %key, %value, %sums, %upstream$bias, %out) {
      api_version = 2 : i32,
      backend_config = "$config",
      operand_layouts = [$rowwise, $rowwise, $rowwise, dense<[2, 1, 0]> : tensor<3xindex>, $rowwise$bias_layout, $rowwise],
      result_layouts = [$turned, $turned, $turned$bias_layout, dense<0> : tensor<1xindex>]
    } : ($query, $key, $key, $sums, $query$bias_type, $query) -> ($query_turned, $key_turned, $key_turned$bias_type, tensor<0xui8>)
    %1 = stablehlo.transpose %0#0, dims = [0, 2, 1, 3] : ($query_turned) -> $query
    %2 = stablehlo.transpose %0#1, dims = [0, 2, 1, 3] : ($key_turned) -> $key
    %3 = stablehlo.transpose %0#2, dims = [0, 2, 1, 3] : ($key_turned) -> $key
    return %1, %2, %3 : $query, $key, $key
  }
}
