#!/bin/bash
# A study on four nodes under Slurm: every node measures with all of its GPUs, the first one also finishes the study.
# Start with: PPAS_STORAGE=postgresql://ppas:PASSWORD@HOST/studies sbatch examples/cluster/slurm-worker.sh study.yaml
#SBATCH --job-name=ppas
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

study=${1:?give the study file, on a file system that all nodes see}
: "${PPAS_STORAGE:?set it to the storage URL before sbatch; it is passed on in the environment, never on a command line}"

# Every task gets SIGTERM two minutes before the time is up, or when the job is preempted: trials are given back. Slurm queues
# a preempted job again, and it goes on; after the time is up the same sbatch goes on.
srun --kill-on-bad-exit=0 bash -c '
    run="runs/$(basename "$1" .yaml).node$SLURM_NODEID"
    if [ "$SLURM_NODEID" -eq 0 ]; then
        # The first GPU of the first node belongs to the process that finishes the study. This shell outlives SIGTERM:
        # Slurm kills what is left when it ends.
        trap : TERM
        ppas worker "$1" --gpus 1,2,3 --run "$run" &
        CUDA_VISIBLE_DEVICES=0 ppas tune "$1" --run "$run.tune"
        code=$?
        wait
        exit $code
    else
        exec ppas worker "$1" --gpus 0,1,2,3 --run "$run"
    fi
' worker "$study"
