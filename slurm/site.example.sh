# Settings of your cluster. Copy this file to slurm/site.sh and keep the lines that you need. The
# scripts read that file on the first node of a job, before they start anything. They use .venv if it
# exists, unless the file puts another environment in front. git ignores slurm/site.sh. Put no passwords or tokens here.

# The environment that lightfed is installed in, unless it is .venv: one of these.
# module purge && module load python/3.12 cuda/12.8
# source ~/miniforge3/bin/activate lightfed

# Flags of every sbatch on this cluster (partition, account) belong in your shell instead:
#   export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=my-project

# Data sets and caches that all nodes see, if the home directory is small.
# export XDG_CACHE_HOME=$SCRATCH/cache

# The network between nodes. Only when a run hangs or crawls at its start: NCCL finds most itself.
# export NCCL_DEBUG=INFO                    # logs which devices it uses
# export NCCL_SOCKET_IFNAME=ib0             # ip -brief address lists the names
# export GLOO_SOCKET_IFNAME=ib0             # the same for gloo (ranks on CPUs, small messages)
# export NCCL_IB_HCA=mlx5_0,mlx5_1
# export FI_PROVIDER=efa                    # AWS

# A container: a prefix to commands (apptainer), or flags of srun (pyxis). It needs lightfed inside,
# and SLURM's scontrol, or a job cannot put itself back into the queue.
# container=(apptainer exec --nv "$HOME/lightfed.sif")
# srun_flags=(--container-image="$HOME/lightfed.sqsh" --container-mounts="$PWD:$PWD" --container-workdir="$PWD")
