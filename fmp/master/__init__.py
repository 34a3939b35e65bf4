"""Master weights: how an optimizer sees more of a 16-bit parameter than its 16 bits.

A 16-bit weight near 1 cannot take an update below 0.4 % (bf16) or 0.05 % (fp16) of itself; what carries its master can.
The optimizer sees and changes the masters, the model computes with the parameters. Each form has a file of its own:

| form         | beside the parameter       | bytes | what is kept of the float32 value                        |
| ------------ | -------------------------- | ----: | -------------------------------------------------------- |
| `f32`        | a float32 copy             |     6 | every bit                                                |
| `remainder`  | the low 16 bits (bf16)     |     4 | every bit                                                |
| `kahan`      | the rounding error, 16-bit |     4 | twice the digits of the format                           |
| `stochastic` | nothing                    |     2 | the digits of the format, and the rest in the mean       |
"""

from fmp.master.form import Form as Form
from fmp.master.stochastic import round_stochastically as round_stochastically
from fmp.master.trees import FORMS as FORMS, init as init, merge as merge, split as split
