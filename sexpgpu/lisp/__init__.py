"""Forms to values: evaluator, macros, modules, budget and the functions of plain data."""
