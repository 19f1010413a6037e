"""The code in the processes of a case. A worker uses public names of Paceline, so that it can also measure
other versions (`--before`)."""
