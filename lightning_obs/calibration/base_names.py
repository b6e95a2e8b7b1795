"""The base names of helper observers, each of which gathers a statistic that the observer of the plan does not keep.

The key of an observer is the name of its module and a base name: that of the observed tensor for observers of the plan
(``"weight"``, ``"input"``...), or one of those below for helpers. Observations make helpers under these names; the
rounding of weights and reports look them up.
"""

#: the smallest and largest value of a module's input, for the report
RANGE = "input range"
#: the Hessian of a module's inputs, by which its weight is rounded
HESSIAN = "weight by its inputs"
#: the products of the gradients at a module's outputs, by which the rows of its weight are rounded together
GRADIENTS = "weight by the gradients at its outputs"
#: the errors of a module's inputs once the modules before it are quantized, which the rounding of its weight corrects
INPUT_ERRORS = "weight by the errors of its inputs"
