"""The rules of JAX's primitives, and of ostinato's, one file for each family."""

from . import associative_scan as associative_scan
from . import calls as calls
from . import control as control
from . import conv_pool as conv_pool
from . import custom_derivatives as custom_derivatives
from . import debug as debug
from . import dot as dot
from . import elementwise as elementwise
from . import errors as errors
from . import fixed_axes as fixed_axes
from . import gather as gather
from . import linalg as linalg
from . import linear as linear
from . import random as random
from . import recurrent as recurrent
from . import reduce as reduce
from . import regions as regions
from . import scatter as scatter
from . import shape as shape
from . import slicing as slicing
from . import sorting as sorting
