"""The study of feature maps: what each gets wrong, and at what cost, at equal feature budgets."""

from phistate.study.contenders import BASELINES, contender_names
from phistate.study.inputs import Inputs, gaussian
from phistate.study.run import Study, study

__all__ = ["BASELINES", "Inputs", "Study", "contender_names", "gaussian", "study"]
