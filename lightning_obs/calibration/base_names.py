"""The base names of helper observers, which gather a statistic that the observer of the plan does not keep.

A key of an observer is the name of a module and a base name: ``"weight"`` or ``"input"`` of the plan, or one of these.
"""

#: the input's smallest and largest value, for the report
RANGE = "input range"
#: the Hessian of a module's inputs, by which its weight is rounded
HESSIAN = "weight by its inputs"
#: the products of the gradients at a module's outputs, by which the rows of its weight are rounded together
GRADIENTS = "weight by the gradients at its outputs"
#: how a module's inputs differ once the modules before it are quantized, which the rounding of its weight makes up for
INPUT_ERRORS = "weight by the errors of its inputs"
