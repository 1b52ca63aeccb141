"""From a graph to launches: decomposition, index arithmetic, fusion and the memory plan. Knows neither torch nor Triton."""
