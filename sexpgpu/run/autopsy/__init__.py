"""Why a step was not finite: the step replayed op by op, the first op to blame, and a folder that shows it again."""
