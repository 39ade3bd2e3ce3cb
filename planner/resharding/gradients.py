"""What the local backward of an operator makes and needs, from the rule it runs by.

On one axis a rule is *split* if anything that the operator reads or makes is not R there. Then

    of a tensor         the gradient is
    S<d>                S<d>
    P                   R
    M                   M       of its own microbatch
    R, split rule       P       each device has the part of the gradient that its work gives
    R, unsplit rule     R       all devices do the same

The third line is f of Megatron-LM, the second its g (Shoeybi et al. 2019, section 3).
"""

from planner.artefacts.sharding import OWN, AxisRule, Rule, Spec


def gradient_spec(rule: Rule, spec: Spec) -> Spec:
    """The spec of the gradient of a tensor that an operator reads or makes.

    Args:
        rule: by which the operator runs.
        spec: of the tensor, one of the rule's.

    >>> from planner.artefacts.sharding import rule_of
    >>> rule = rule_of(["S2,S0->P"])
    >>> gradient_spec(rule, ("S2",)), gradient_spec(rule, ("P",))
    (('S2',), ('R',))
    >>> gradient_spec(rule_of(["R,S1->S2"]), ("R",))
    ('P',)
    """
    return tuple(map(gradient_part, rule.axes, spec))


def gradient_part(rule: AxisRule, part: str) -> str:
    """The same on one axis: the part of the gradient's spec, from the tensor's."""
    if part == OWN or part.startswith("S"):
        return part
    return "R" if part == "P" or not rule.is_split else "P"
