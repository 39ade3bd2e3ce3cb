"""How the operators of one stage are split, by a choice program over all rules of a mesh."""
