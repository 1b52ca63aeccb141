;;; An interatomic potential of ethanol, trained on energies and forces of GFN2-xTB (examples/make_ethanol.py made them).
;;; It learns from a trajectory at 500 K, and is judged on another one at 300 K.
;;;
;;;     sexpgpu run examples/potential.lisp
(import "nn" "optim" "flashcart")

(defknob channels 16 "feature channels of every rank" :min 1)
(defknob l-hidden 1 "highest rank of the atoms' features between layers" :min 0)
(defknob l-edge 2 "highest rank of the edge attributes" :min 0)
(defknob r-max 5.0 "cutoff radius in Å")
(defknob layers 2 "message-passing layers" :min 1)
(defknob correlation 3 "factors of the many-body products" :min 1)
(defknob radial-functions 8 "Chebyshev polynomials of an edge's length" :min 2)
(defknob hidden 32 "units of the hidden layers" :min 1)
(defknob batch 10 "structures in a step" :min 1)
(defknob lr 1e-2 "peak learning rate")
(defknob forces-weight 0.1 "weight of a force component beside an atom's energy")
(defknob steps 2000 "steps of the run")
(defknob seed 1 "seed of the run")

(defvariant quick :steps 300)
(defvariant paper-69k :channels 20 :l-hidden 2 :l-edge 3 :r-max 6.0 :hidden 64)

(defdata ethanol
  (extxyz "data/ethanol_500K.extxyz.gz" :elements (H C O) :cutoff r-max :length-unit angstrom :energy-unit eV)
  :split ((train 9/10) (valid 1/10)))

(defdata cooler
  (extxyz "data/ethanol_300K.extxyz.gz" :elements (H C O) :cutoff r-max :length-unit angstrom :energy-unit eV))

;; One layer: messages from the neighbours, gated, then products of the atom's features with themselves.
(deflayer layer (x attributes radial senders receivers result)
  (product-layer
    (gate (interaction x attributes radial senders receivers channels :l-max l-edge :hidden [hidden hidden]
                       :neighbours (statistic ethanol "neighbours")))
    :correlation correlation :l-max result))

(deflayer site-energies (vectors species senders receivers)
  (let* ((lengths (vector-lengths vectors))
         (attributes (edge-attributes vectors lengths l-edge))
         (radial (* (chebyshev lengths :count radial-functions :r-max r-max)
                    (reshape (polynomial-cutoff lengths :r-max r-max) [(dim lengths 0) 1])))
         (atoms (dim species 0))
         (shifts (statistic ethanol "shifts"))
         (x (reshape (embedding species (dim shifts 0) channels) [atoms 1 channels]))
         (found nil))
    (dolist (i (range layers))
      (setq x (layer x attributes radial senders receivers (if (= i (- layers 1)) 0 l-hidden)))
      (setq found (append found [(scalars x)])))
    (+ (per-element shifts species)
       (* (statistic ethanol "force-rms")
          (reshape (scalar-mlp (concat found :axis -1) [hidden 1] :name "readout") [atoms])))))

(defun energies (vectors species senders receivers graph graph-mask)
  (sum-by (site-energies vectors species senders receivers) graph (dim graph-mask 0)))

;; Energies of structures and forces on atoms; `sexpgpu.ase` asks for this function, with `strain` for the stress.
(defun energy-forces (positions offsets species senders receivers graph graph-mask)
  (let ((energy (energies (edge-vectors positions offsets senders receivers) species senders receivers graph graph-mask)))
    (list energy (forces-of (* energy graph-mask) positions))))

(defun energy-forces-stress (positions offsets cell volume species senders receivers graph graph-mask)
  (let* ((strain (free-strain cell))
         (vectors (strained (edge-vectors positions offsets senders receivers) strain graph receivers))
         (energy (energies vectors species senders receivers graph graph-mask)))
    (list energy (forces-of (* energy graph-mask) positions) (stress-of (* energy graph-mask) strain volume))))

(defun training-loss (positions offsets species senders receivers graph graph-mask atom-mask atoms energy forces)
  (destructuring-bind (e f) (energy-forces positions offsets species senders receivers graph graph-mask)
    (list (+ (masked-sum (huber-terms (/ (- e energy) atoms) 0.01) graph-mask)
             (* forces-weight (masked-sum (huber-terms (- f forces) 0.1) atom-mask)))
          (sum graph-mask))))

(defun force-error (positions offsets species senders receivers graph graph-mask atom-mask forces)
  (destructuring-bind (e f) (energy-forces positions offsets species senders receivers graph graph-mask)
    (list (masked-sum (abs (- f forces)) atom-mask) (* 3 (sum atom-mask)))))

;; The mean error of a force component over the mean component.
(defun relative-force-error (positions offsets species senders receivers graph graph-mask atom-mask forces)
  (destructuring-bind (e f) (energy-forces positions offsets species senders receivers graph graph-mask)
    (list (masked-sum (abs (- f forces)) atom-mask) (masked-sum (abs forces) atom-mask))))

(defun energy-error-per-atom (positions offsets species senders receivers graph graph-mask atoms energy)
  (destructuring-bind (e f) (energy-forces positions offsets species senders receivers graph graph-mask)
    (list (masked-sum (abs (/ (- e energy) atoms)) graph-mask) (sum graph-mask))))

(defrun train
  :data (graphs ethanol :split train :batch batch :shuffle true)
  :loss training-loss
  :optimizer (adamw :lr (warmup-hold-shaped :peak lr :warmup (floor (* 1/20 steps)) :decay (floor (* 1/2 steps)) :steps steps)
                    :weight-decay 0)
  :clip-norm 10
  :ema 0.99
  :steps steps
  :seed seed
  :log-every 50
  :checkpoint-every 1000)

(defeval valid
  :data (graphs ethanol :split valid :batch 20)
  :every 500
  :weights ema
  :metrics ((force-error force-error)))

(defeval held-out
  :data (graphs cooler :batch 20)
  :every 500
  :weights ema
  :metrics ((force-error force-error) (relative-force-error relative-force-error)
            (energy-error-per-atom energy-error-per-atom)))
