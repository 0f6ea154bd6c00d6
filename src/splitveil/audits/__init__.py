"""The audits: attacks on a deployed client, and what they got."""

from splitveil.audits.flags import FLAGS as FLAGS
from splitveil.audits.flags import Evidence as Evidence
from splitveil.audits.flags import Flag as Flag
from splitveil.audits.flags import raise_flags as raise_flags
from splitveil.audits.suite import Store as Store
from splitveil.audits.suite import accuracy as accuracy
from splitveil.audits.suite import run_attacks as run_attacks
from splitveil.audits.summary import by_attack as by_attack
from splitveil.audits.summary import ceiling_mse as ceiling_mse
from splitveil.audits.summary import floor_mse as floor_mse
from splitveil.audits.summary import per_image as per_image
from splitveil.audits.summary import strongest as strongest
from splitveil.audits.summary import strongest_blackbox as strongest_blackbox
from splitveil.audits.summary import worst_case as worst_case
from splitveil.audits.target import Attempt as Attempt
from splitveil.audits.target import Target as Target
from splitveil.audits.target import gallery as gallery
